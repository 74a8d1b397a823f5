"""Lets the tests of this folder import the adapters that stand beside the engine's tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]
