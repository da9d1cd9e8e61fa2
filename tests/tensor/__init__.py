"""Tests of tensor, sequence and loss parallelism."""
