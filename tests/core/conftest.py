"""Lets the tests of this folder import `flights`, which stands beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
