"""Text to tokens, without holding up other threads; and how many characters a token can stand for at most."""

import json
from typing import Any

from tokenizers import models, pre_tokenizers

# What may stand before the model without taking any character away: what each makes of so many characters is at least
# as many. Composing (NFC, NFKC) makes one character of at most four: no decomposition is longer (Unicode, annex 15).
_KEPT_BY_NORMALIZERS = {"NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1, "NFC": 4, "NFKC": 4}
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
_CUTTING_PRE_TOKENIZERS = ("Split", "Punctuation")  # they keep all unless they are told to remove what they cut at


class Encoder:
    """The tokenizer of a model for many threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a PreTrainedTokenizerFast, whose backend nobody else may set to truncate or pad."""
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest = longest_token(self._backend)

    def at_least(self, text: str) -> int:
        """So many tokens at least, by its length alone; 0 if nobody can say."""
        return 0 if self._longest is None else -(-len(text) // self._longest)

    def encode(self, text: str, *, special: bool) -> "Encoded":
        """`special`: with the tokens that the tokenizer puts around a text. UnicodeEncodeError for half a character."""
        text.encode()
        # A batch of one: `encode` holds the interpreter for as long as it takes, `encode_batch` lets other threads run.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return Encoded(encoding)


class Encoded:
    """Tokens that may be too many to make a list of them."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def ids(self) -> list[int]:
        return list(self._encoding.ids)


def longest_token(backend: Any) -> int | None:
    """How many characters of a text a token stands for at most; None if some of them can leave no trace.

    That can be where spaces are cut away, where what is unknown is dropped or becomes one token however long it is, or
    where we do not know what a part of the tokenizer (a tokenizers.Tokenizer) does.
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
    """The parts of a normalizer or pre-tokenizer, as its JSON names them, sequences opened."""
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
    """One character after these stands for so many before them at most."""
    most = 1
    for part in normalizers:
        if part["type"] == "Replace":
            found = part["pattern"].get("String")  # or an expression, which may find more than it is long
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
