"""What the planner's subprocess runs: requests as JSON lines on standard input, results as JSON lines on the other."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

__all__ = ["main"]


def main() -> None:
    """Answer each request; the last line wins, so that libraries may print before."""
    # transformers and torch explain themselves at length when they are used like this.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # A trace must never reach for the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lightning_swift.planner._trace_step import trace

    requests = json.load(sys.stdin)
    results = []
    for request in requests:
        results.append(trace(request))
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
