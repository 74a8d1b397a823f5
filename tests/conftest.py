"""No test is about time, so no example of a property is too slow, however busy the machine is."""

from hypothesis import settings

settings.register_profile("kvarve", deadline=None)
if settings.get_current_profile_name() in ("default", "ci"):  # else whoever runs the tests has chosen
    settings.load_profile("kvarve")
