"""The checkpoint format: written by every strategy, read by every other one; knows nothing of Lightning."""
