"""`python -m tfdist` is the `tfdist` command."""

import sys

from tfdist.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
