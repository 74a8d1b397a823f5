"""`python -m kvarve` is `kvarve`."""

import sys

from kvarve.cli.main import main

sys.exit(main())
