"""What translating another engine's command takes torch to know: bytes of tokens, and the memory of a GPU."""

from collections.abc import Sequence
from pathlib import Path

from kvarve.memory.machine import device_bytes
from kvarve.reference.engine.families import Facts, describe_model
from kvarve.reference.engine.model import choose_device, quiet_libraries
from kvarve.reference.server.serve_settings import PAGE_TOKENS, Settings
from kvarve.settings.translate import value_of


def pages_bytes(words: Sequence[str], tokens: int) -> int:
    """As `translate.Measures` says."""
    quiet_libraries()
    found, states = _facts(words), _number(words, "--states")
    return int(tokens * found.bytes_per_token + states * found.bytes_per_snapshot) // _ranks(words)


def gpu_bytes(words: Sequence[str]) -> tuple[int, int] | None:
    total = device_bytes(choose_device(value_of(words, "--device") or Settings.device))
    if total is None:
        return None
    files = Path(value_of(words, "--model") or Settings.model).glob("*.safetensors")
    return total, sum(file.stat().st_size for file in files) // _ranks(words)


def _ranks(words: Sequence[str]) -> int:
    return _number(words, "--tp") or 1


def _facts(words: Sequence[str]) -> Facts:
    pages = _number(words, "--page-tokens") or PAGE_TOKENS
    chunks = _number(words, "--chunk-tokens") or max(Settings.chunk_tokens, pages)
    model, dtype = value_of(words, "--model") or Settings.model, value_of(words, "--dtype") or Settings.dtype
    return describe_model(model, dtype, pages, chunks, value_of(words, "--kv-cache-dtype") or Settings.kv_cache_dtype)


def _number(words: Sequence[str], name: str) -> int:
    text = value_of(words, name) or ""
    return int(text) if text.isdecimal() and len(text) < 20 else 0
