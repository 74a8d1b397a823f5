"""Everything kvarve raises on purpose. A miss is an answer, trouble is one of these, a bug is an assertion."""


class KvarveError(Exception):
    """Base of every error that kvarve raises on purpose; its text says what is wrong and what to do."""


class ConfigError(KvarveError):
    """A setting, flag or argument that cannot work. Nothing has been touched yet when it is raised."""


def require_assertions() -> None:
    """ConfigError where Python leaves out assertions, by which the cache ends before it gives wrong bytes."""
    if not __debug__:
        raise ConfigError("kvarve needs its assertions: leave out -O and PYTHONOPTIMIZE")


class TooLong(ConfigError):
    """A prompt that does not fit, together with the tokens of its answer."""


class StorageError(KvarveError):
    """An operation of a storage backend failed: the medium failed, or it holds data of another kind."""


class ModelError(KvarveError):
    """A checkpoint that cannot be loaded, or a model whose state this version cannot keep."""


class Busy(KvarveError):
    """All capacity is in use; the same call may succeed later."""


class Broken(KvarveError):
    """A bug in the cache: a slot may hold another page's bytes, so serving stops."""
