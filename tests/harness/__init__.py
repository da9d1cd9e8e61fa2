"""What the tests share: ranks, tiny models, recorded losses."""
