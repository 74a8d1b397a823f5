"""For tests of kvarve and of backends that others write: honest fakes, and the suites that every backend must pass.

The suites need pytest and hypothesis, so they are loaded when they are asked for; the rest needs neither.
"""

import sys
from typing import TYPE_CHECKING, Any

from kvarve.testing.faulty_storage import FaultyStorage, Rule

if TYPE_CHECKING:
    from kvarve.testing.suite import ByteCapacitySuite, CapacitySuite, MakeStorage, QuotaSuite, StorageSuite, TtlSuite

__all__ = [
    "ByteCapacitySuite",
    "CapacitySuite",
    "FaultyStorage",
    "MakeStorage",
    "QuotaSuite",
    "Rule",
    "StorageSuite",
    "TtlSuite",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if f"{__name__}.suite" not in sys.modules:
        import pytest

        for each in ("suite", "suite_use"):  # failures then show their values
            pytest.register_assert_rewrite(f"{__name__}.{each}")
    from kvarve.testing import suite

    return getattr(suite, name)
