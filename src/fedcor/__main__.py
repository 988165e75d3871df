"""`python -m fedcor`, the same as the command `fedcor`."""

import sys

from fedcor.cli import main

sys.exit(main())
