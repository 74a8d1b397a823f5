"""TLS: a certificate chain and its key from two PEM files, read again on SIGHUP when they have been renewed."""

import logging
import ssl
from pathlib import Path

from kvarve.errors import ConfigError

log = logging.getLogger(__name__)


class Certificate:
    """What the server shows to clients: TLS 1.2 and newer. Connections that are open keep what they began with."""

    def __init__(self, chain: Path, key: Path | None) -> None:
        """`key`: a file of its own, unless the chain's file has it. ConfigError if they cannot be used."""
        self._chain, self._key = chain, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._load(self.context)

    def reload(self) -> None:
        """Show what the files have now. Files that cannot be used are logged, and the certificate stays."""
        try:
            self._load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))  # a failed load may leave half of it
            self._load(self.context)
        except ConfigError as e:
            log.error("the certificate stays as it is: %s", e)
        else:
            log.info("certificate read again: %s", self._chain)

    def _load(self, context: ssl.SSLContext) -> None:
        for option, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            if path is not None:
                try:
                    path.open("rb").close()
                except OSError as e:
                    raise ConfigError(f"{option}: {path}: {e.strerror}") from None
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as e:
            why = "they do not belong together" if "MISMATCH" in str(e).upper() else "not a PEM certificate and its key"
            raise ConfigError(f"--tls-cert {self._chain}, --tls-key {self._key or 'not given'}: {why}") from None


def _no_password() -> str:
    """Of an encrypted key: without this, OpenSSL would ask for it at the terminal."""
    raise ValueError
