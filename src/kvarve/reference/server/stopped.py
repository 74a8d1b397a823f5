"""How a server says to the front before it that its engine has stopped: a header of the error, and of `/health`."""

ENGINE = "X-Kvarve-Engine"
BEFORE = "stopped-before"  # the request came: nothing of it was done
DURING = "stopped-during"  # the request, which may be why
