"""Lets the tests of this folder import what stands beside them, and the adapters of the engine's tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]
