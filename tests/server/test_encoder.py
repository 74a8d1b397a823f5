"""Tokens are those of transformers, and no text has fewer than its length says."""

import random
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvarve.reference.engine.model import BUILTIN
from kvarve.reference.server.encoder import Encoder, longest_token
from tests.sim.models import byte_tokenizer

SONG = "hvarv på åkern, 日本語の川 🐟 and so on;      \n\n\n "
BYTES = pre_tokenizers.ByteLevel.alphabet()
MARK = "\u2581"  # how many tokenizers write a space


def by_bytes(normalizer: Any = None, *before: Any) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=BYTES, special_tokens=["<a long special token>"], show_progress=False
    )
    tokenizer.train_from_iterator([SONG * 3, " " * 40, "-" * 64, "\u1fa5" * 40], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def by_fallback(missing: int = 0) -> Tokenizer:
    """BPE that spells unknown characters in bytes, as Llama 2 and Gemma have it."""
    merges = [(MARK, MARK), (MARK * 2, MARK * 2), ("a", "n"), ("an", "d")]
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256 - missing)),
        MARK,
        MARK * 2,
        MARK * 4,
        *"and",
        "an",
        "and",
    ]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    return tokenizer


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def builtin() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(BUILTIN / "tiny-hybrid")


SPLIT = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
BOUNDED: dict[str, Tokenizer] = {
    "bytes": by_bytes(),
    "composing": by_bytes(normalizers.NFC()),
    "compatible": by_bytes(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "split": by_bytes(None, SPLIT, pre_tokenizers.Digits(individual_digits=True)),
    "fallback": by_fallback(),
    "metaspace": changed(by_fallback(), normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()),
    "ours": byte_tokenizer().backend_tokenizer,
    "builtin": builtin().backend_tokenizer,
}


def stripping() -> Tokenizer:
    tokenizer = by_bytes()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


UNBOUNDED: dict[str, Tokenizer] = {
    "words": Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "pieces": Tokenizer(models.WordPiece({"<unk>": 0}, unk_token="<unk>")),
    "unigrams": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "some bytes are missing": by_fallback(missing=1),
    "no bytes at all": Tokenizer(models.BPE({"a": 0}, [])),
    "suffix": changed(
        by_bytes(), model=models.BPE({byte: i for i, byte in enumerate(BYTES)}, [], end_of_word_suffix="_")
    ),
    "spaces are dropped": changed(by_fallback(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "removed": by_bytes(None, pre_tokenizers.Split(" ", "removed")),
    "runs become one": by_bytes(normalizers.Replace(Regex(" +"), " ")),
    "shorter": by_bytes(normalizers.Replace("aa", "a")),
    "stripped": by_bytes(normalizers.Strip()),
    "accents go": by_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "spaces before a mark go": stripping(),
}
PIECES = [
    " ",
    "\n",
    "a",
    "\u0301",
    "\u0323",
    "ω\u0314\u0301\u0345",
    "각",
    "ﷺ",
    "İ",
    "<a long special token>",
    "<|end|>",
    "--",
    "🐟",
    "7",
]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str) -> None:
    backend = BOUNDED[name]
    longest = longest_token(backend)
    assert longest is not None

    @settings(max_examples=30)
    @given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=40).map("".join)))
    def holds(text: str) -> None:
        assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False))

    holds()
    for piece in PIECES:
        for text in (piece * 200, unicodedata.normalize("NFD", piece) * 200, unicodedata.normalize("NFD", piece) * 40):
            assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False))


def test_a_composed_character_stands_for_four_at_most() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1)) == 4


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_can_swallow_text_gives_no_bound(name: str) -> None:
    assert longest_token(UNBOUNDED[name]) is None


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("make", [byte_tokenizer, builtin], ids=["bytes", "builtin"])
def test_the_tokens_are_those_of_transformers(make: Any, special: bool) -> None:
    dice = random.Random(7)
    encoder, same = Encoder(make()), make()
    for _ in range(50):
        text = "".join(dice.choices([*PIECES, *SONG, "<|system|>", "<end>"], k=dice.randrange(60)))
        found = encoder.encode(text, special=special)
        assert list(found.ids) == same.encode(text, add_special_tokens=special) and len(found) == len(found.ids)
        assert encoder.at_least(text) <= len(found)


def test_a_tokenizer_that_was_set_to_truncate_or_pad_does_neither() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=10)
    assert Encoder(tokenizer).encode("12345", special=True).ids == byte_tokenizer().encode("12345")
