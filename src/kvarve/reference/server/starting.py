"""What a start is doing, for the log and for systemd: each phase as it begins, and at the end how long each took."""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

Tell = Callable[[str], None]
NOTIFY = "NOTIFY_SOCKET"


def tell_systemd() -> Tell:
    """Sends assignments such as "READY=1" to the service manager (sd_notify(3)), if one has started this process. The
    variable is taken out of the environment, so that no process started later speaks for this one."""
    address = os.environ.pop(NOTIFY, "")
    if not address.startswith(("/", "@")):
        return lambda state: None
    if address.startswith("@"):
        address = "\0" + address[1:]

    def tell(state: str) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(state.encode(), address)

    return tell


class Starting:
    """The phases of one start."""

    def __init__(self, tell: Tell = lambda state: None, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._began_s = self._phase_s = clock()
        self._phase = ""
        self._took: list[str] = []

    def begins(self, phase: str, about: str) -> None:
        """A phase begins, and the one before it has ended."""
        self._end()
        self._phase = phase
        log.info("%s: %s", phase, about)
        self._tell(f"STATUS={phase}: {about}".replace("\n", " "))

    def ready(self, url: str) -> None:
        self._end()
        log.info("listening on %s after %.1f s (%s)", url, self._clock() - self._began_s, ", ".join(self._took))
        self._tell(f"READY=1\nSTATUS=serving on {url}")

    def _end(self) -> None:
        now = self._clock()
        if self._phase:
            self._took.append(f"{self._phase} {now - self._phase_s:.1f} s")
        self._phase, self._phase_s = "", now
