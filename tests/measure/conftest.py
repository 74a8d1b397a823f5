"""`kvarve bench` against real servers, and its parts against known numbers. Tests import `fake_server` beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
