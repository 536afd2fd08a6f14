"""`python -m headway` is `headway`."""

from __future__ import annotations

import sys

from headway.cli import main

if __name__ == "__main__":
    sys.exit(main())
