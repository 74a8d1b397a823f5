"""A real model in bfloat16 over a storage that compresses its pages to two thirds: the same logits, bit for bit."""

from pathlib import Path

import pytest
import torch
from recorder import Recorder

from engines import LONG_S, Make, a_prompt, a_request
from kvarve.engine.model import load_model

pytest.importorskip("zstandard")
TOKENS, CHUNK = 600, 256


@pytest.mark.long
@pytest.mark.parametrize(("writes", "reads"), [("zstd", "no"), ("no", "zstd")])
def test_the_logits_are_the_same_bits_after_a_restart(
    make: Make, recorder: Recorder, tmp_path: Path, writes: str, reads: str
) -> None:
    model = load_model("builtin:tiny-hybrid", dtype="bfloat16")
    url = f"file://{tmp_path}/store?capacity=256MiB&compress="
    engine = make(model, storage=url + writes)
    _, expected, _ = engine.submit(a_request(a_prompt(TOKENS))).result(LONG_S)
    cold = recorder.take()
    assert engine.settle()
    stats = engine.cache.stats()
    if writes == "zstd":
        assert stats["compress_stored_bytes.attention"] < 0.72 * stats["compress_plain_bytes.attention"]
    engine.shutdown()
    engine = make(model, storage=url + reads)
    _, tokens, last = engine.submit(a_request(a_prompt(TOKENS))).result(LONG_S)
    warm = recorder.take()
    assert tokens == expected and last.usage is not None and last.usage.storage == TOKENS // CHUNK * CHUNK
    assert warm and all(torch.equal(logits, cold[position]) for position, logits in warm.items())
