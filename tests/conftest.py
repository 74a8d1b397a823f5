"""No test is about time, so no example of a property is too slow, however busy the machine is."""

import os
import sys
from pathlib import Path

from hypothesis import settings

# Before torch is imported: threads that wait for each other spin, which on a busy machine costs many times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent))

# They run inside vLLM and SGLang, in venvs of their own, with a conftest of their own (`make test-engines`).
collect_ignore = ["engines"]
pytest_plugins = ["budget", "pytester"]

settings.register_profile("kvarve", deadline=None)
if settings.get_current_profile_name() in ("default", "ci"):  # else the caller has chosen a profile
    settings.load_profile("kvarve")
