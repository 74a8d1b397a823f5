"""Everything kvarve raises on purpose. A miss is an answer, trouble is one of these, a bug is an assertion."""


class KvarveError(Exception):
    """Base of every error that kvarve raises on purpose; its text says what is wrong and what to do."""


class ConfigError(KvarveError):
    """A setting, flag or argument that cannot work. Nothing has been touched yet when it is raised."""


class StorageError(KvarveError):
    """A storage backend could not do what it was asked: the medium failed, or it holds something of another kind."""


class ModelError(KvarveError):
    """A checkpoint that cannot be loaded, or a model whose state this version cannot keep."""


class Busy(KvarveError):
    """Every place is taken; the same call may succeed later."""


class Broken(KvarveError):
    """The cache has failed in a way that nothing foresaw: nobody knows any more whose a page is, so all ends here."""
