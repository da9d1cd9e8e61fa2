"""One script per claim: ours beside its peers in one run, each printing a table."""
