"""No test is about time, so no example of a property is too slow, however busy the machine is."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["budget", "pytester"]

settings.register_profile("kvarve", deadline=None)
if settings.get_current_profile_name() in ("default", "ci"):  # else the caller has chosen a profile
    settings.load_profile("kvarve")
