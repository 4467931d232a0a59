"""`python -m understudy.jit`."""

import os
import sys

from .check import main
from .digest import ALGORITHM, XXH3

if __name__ == "__main__":
    if ALGORITHM != XXH3 and not sys.flags.safe_path:
        # In a checkout Python finds that first, which has no C++ parts. -P: what is installed, if it is.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "understudy.jit", *sys.argv[1:]])
    sys.exit(main())
