"""Tokenization that releases the GIL, and a bound on the characters that one token can stand for."""

import json
from typing import Any

from tokenizers import models, pre_tokenizers

# Normalizers that remove no character, with the most input characters that one output character can stand for. NFC and
# NFKC compose one character of at most four: no decomposition is longer (Unicode, annex 15).
_KEPT_BY_NORMALIZERS = {"NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1, "NFC": 4, "NFKC": 4}
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
_CUTTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # they keep all text unless their behavior is "Removed"


class Encoder:
    """A model's tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a PreTrainedTokenizerFast, whose backend no other code may set to truncate or pad."""
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest = longest_token(self._backend)

    def at_least(self, text: str) -> int:
        """A lower bound of the text's tokens by its length alone; 0 if there is none."""
        return 0 if self._longest is None else -(-len(text) // self._longest)

    def encode(self, text: str, *, special: bool) -> Any:
        """A tokenizers.Encoding, whose tokens may be too many to make a list of them. `special`: add the tokenizer's
        special tokens. UnicodeEncodeError for a lone surrogate."""
        text.encode()
        # A batch of one: `encode` holds the GIL throughout, `encode_batch` releases it.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return encoding


def longest_token(backend: Any) -> int | None:
    """How many characters of a text one token stands for at most; None if there is no bound.

    There is none if the tokenizer (a tokenizers.Tokenizer) strips spaces, drops unknown text or maps it to one token
    whatever its length, or has a part that is not listed here.
    """
    if not isinstance(backend.model, models.BPE):
        return None
    kept = _kept(_parts(backend.normalizer, "normalizers"))
    cutting = _parts(backend.pre_tokenizer, "pretokenizers")
    if kept is None or not all(_keeps(part) for part in cutting):
        return None
    vocabulary, model = backend.get_vocab(with_added_tokens=False), backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    by_bytes = any(part["type"] == "ByteLevel" for part in (*cutting, *_parts(backend.normalizer, "normalizers")))
    known = by_bytes and all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    fallback = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    added = backend.get_added_tokens_decoder().values()
    if not (known or fallback) or any(token.lstrip or token.rstrip for token in added):
        return None
    return kept * max(map(len, (*vocabulary, *(token.content for token in added))))


def _parts(whole: Any, within: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer as JSON, with sequences flattened."""
    if whole is None:
        return []
    opened, closed = [json.loads(whole.__getstate__())], list[dict[str, Any]]()
    while opened:
        part = opened.pop(0)
        if part["type"] == "Sequence":
            opened = [*part[within], *opened]
        else:
            closed.append(part)
    return closed


def _kept(normalizers: list[dict[str, Any]]) -> int | None:
    """The most input characters that one output character of these stands for; None if there is no bound."""
    most = 1
    for part in normalizers:
        if part["type"] == "Replace":
            found = part["pattern"].get("String")  # or a regex, which may match more than it is long
            if found is None or len(found) > len(part["content"]):
                return None
        elif part["type"] in _KEPT_BY_NORMALIZERS:
            most *= _KEPT_BY_NORMALIZERS[part["type"]]
        else:
            return None
    return most


def _keeps(part: dict[str, Any]) -> bool:
    if part["type"] in _CUTTING_PRE_TOKENIZERS:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING_PRE_TOKENIZERS
