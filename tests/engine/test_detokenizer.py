"""Tokens in one by one, text out: the same text as that of all tokens at once, and never half a character."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvarve.reference.engine.model import Detokenizer
from tests.sim.models import byte_tokenizer

# A text's first token loses its leading space, added tokens hold spaces, and special tokens are no text.
ADDED = [AddedToken("<tool>", normalized=False), AddedToken(" spaced ", normalized=False)]


def byte_fallback() -> Tokenizer:
    """As Llama's: a token for each byte that no word has, and a space at the beginning that is none."""
    words = ["▁", "▁a", "▁hello", "he", "llo", "é", "日", "▁▁", "x", "!", "\ufffd"]
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def word_pieces() -> Tokenizer:
    """A space before each word, but not before a full stop, nor in `don't`."""
    words = ["[UNK]", "a", "hello", "##llo", "##x", "!", ".", "'", "don", "t", "not", "do", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    if kind == "bytes":
        return byte_tokenizer()
    tokenizer = {"byte fallback": byte_fallback, "word pieces": word_pieces}[kind]()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(ADDED)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def at_once(kind: str, ids: list[int], skip: bool) -> str:
    return str(tokenizer_of(kind).decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def one_by_one(kind: str, ids: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer_of(kind), skip)
    return "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()


def tokens(kind: str, most: int = 40) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer_of(kind)) - 1), max_size=most)


@pytest.mark.parametrize("kind", ["bytes", "word pieces"])
@given(data=st.data(), skip=st.booleans())
def test_any_tokens_give_the_text_of_all_of_them_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(tokens(kind))
    assert one_by_one(kind, ids, skip) == at_once(kind, ids, skip)


@settings(max_examples=40)
@given(data=st.data(), skip=st.booleans())
def test_bytes_among_words_give_the_text_of_all_tokens_at_once(data: st.DataObject, skip: bool) -> None:
    """Bytes of whole characters, or of none, between other tokens."""
    kind, ids = "byte fallback", list[int]()
    characters = st.text(st.characters(codec="utf-8"), max_size=4).map(str.encode)
    upper_half = st.binary(min_size=1, max_size=3).map(lambda some: bytes(byte | 0x80 for byte in some))
    any_but_bytes = st.lists(st.integers(257, len(tokenizer_of(kind)) - 1), max_size=4)
    runs = st.tuples(characters | upper_half.filter(_none), st.integers(257, 267), any_but_bytes)
    for run, word, more in data.draw(st.lists(runs, max_size=8)):
        ids += [*(1 + byte for byte in run), word, *more]
    assert one_by_one(kind, ids, skip) == at_once(kind, ids, skip)


def _none(some: bytes) -> bool:
    """Whether no beginning of these bytes is text, which would have been returned before they turn out to be none."""
    return not any(_is_text(some[:end]) for end in range(1, len(some) + 1))


def _is_text(some: bytes) -> bool:
    try:
        some.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(data=st.data())
def test_bytes_that_spoil_the_bytes_before_them_take_no_text_back_and_harm_none_after_them(data: st.DataObject) -> None:
    """In a run of bytes that is no text as a whole, the library decodes each byte as U+FFFD: also those of characters
    that have been returned."""
    kind, he = "byte fallback", 260
    run = data.draw(st.lists(st.integers(1, 256), max_size=40))
    words = data.draw(st.lists(st.integers(257, 266), max_size=10))
    text, words_alone = one_by_one(kind, [he, *run, *words]), one_by_one(kind, [he, *words])
    assert text.startswith("he")
    assert text.endswith(words_alone.removeprefix("he"))


def test_a_special_token_is_no_text_unless_it_is_asked_for() -> None:
    ids = tokenizer_of("byte fallback").convert_tokens_to_ids(["<s>", "▁hello", "<tool>", "▁a", "</s>"])
    assert one_by_one("byte fallback", ids) == "hello<tool> a"
    assert one_by_one("byte fallback", ids, skip=False) == "<s> hello<tool> a</s>"


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer.encode("å", add_special_tokens=False)[0]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(half) for _ in range(100)]
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 100
    assert 0 < max(map(len, pieces)) < 30
    # A special token says nothing, and bytes of an incomplete character are returned at the end.
    assert [detokenizer.push(token) for token in (256, *tokenizer.encode("ok"), half)] == ["", "o", "k", ""]
    assert detokenizer.flush() == "\ufffd"
