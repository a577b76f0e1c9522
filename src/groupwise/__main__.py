"""``python -m groupwise`` is ``groupwise``."""

import sys

from groupwise.cli import main

sys.exit(main())
