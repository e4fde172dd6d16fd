"""``python -m rsrv``: the command line, for environments where the ``rsrv`` script is not on PATH."""

import sys

from rsrv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
