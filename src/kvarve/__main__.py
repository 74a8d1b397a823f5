"""`python -m kvarve` is `kvarve`."""

import sys

from kvarve.cli import main

sys.exit(main())
