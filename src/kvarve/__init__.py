"""kvarve: a hierarchical prefix cache for hybrid language models (see docs/architecture.md)."""

__version__ = "0.1.0"
