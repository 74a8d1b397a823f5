"""Lets the tests of this folder import what stands beside them, and the cache's engine without a model."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
