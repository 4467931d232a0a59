"""`python -m understudy.jit`."""

import sys

from .check import main

if __name__ == "__main__":
    sys.exit(main())
