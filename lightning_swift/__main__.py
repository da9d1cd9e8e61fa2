"""``python -m lightning_swift``: the same as the ``lightning-swift`` command."""

from __future__ import annotations

import sys

from lightning_swift.cli import main

if __name__ == "__main__":
    sys.exit(main())
