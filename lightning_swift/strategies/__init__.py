"""Lightning strategies, one user-facing class per file."""
