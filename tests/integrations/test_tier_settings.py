"""What an operator writes about a tier is read as meant, or refused with what to do; weights are told apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvarve.errors import ConfigError
from kvarve.integrations.checkpoint import weights_fingerprint
from kvarve.integrations.tier_settings import TierSettings, read_settings

URL = "file:///var/kvarve?capacity=10GiB"
MORE = "memory://m?capacity=1GiB"


def test_one_url_is_enough_and_several_are_tiers() -> None:
    assert read_settings({"storage": URL}) == TierSettings((URL,))
    given = {"storage": [URL, MORE], "deadline_s": 2, "weights": "v3", "identity": "lora 7"}
    assert read_settings(given) == TierSettings((URL, MORE), 2, "v3", "lora 7")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs a storage"),
        ({"storage": URL, "deadline": 5}, "no setting 'deadline': did you mean 'deadline_s'"),
        ({"storage": URL, "frobnicate": 5}, "no setting 'frobnicate': It knows storage, deadline_s"),
        ({"storage": 7}, "URL or a list of URLs, not"),
        ({"storage": [URL, 7]}, "URL or a list of URLs, not"),
        ({"storage": []}, "no storage is named"),
        ({"storage": [URL, URL]}, "the same place"),
        ({"storage": "redis://host"}, "no storage of the kind 'redis'"),
        ({"storage": "file:///x?capactiy=1GiB"}, "unknown parameter 'capactiy'"),
        ({"storage": URL, "deadline_s": 0}, "above zero"),
        ({"storage": URL, "deadline_s": "5"}, "above zero"),
        ({"storage": URL, "deadline_s": True}, "above zero"),
        ({"storage": URL, "deadline_s": float("nan")}, "above zero"),
        ({"storage": URL, "weights": 3}, "weights is a text"),
        ({"storage": URL, "identity": None}, "identity is a text"),
        ({"storage": URL, "enable_kv_events": "yes"}, "true or false"),
        ({"storage": URL, "locality": "NEAR"}, "LOCAL or REMOTE"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings(given)


def test_arguments_that_the_engine_adds_are_ignored_and_those_of_the_operator_are_not() -> None:
    assert read_settings({"storage": URL, "new_in_vllm": object()}, written={"storage"}) == TierSettings((URL,))
    with pytest.raises(ConfigError, match="new_in_vllm"):
        read_settings({"storage": URL, "new_in_vllm": 1}, written={"storage", "new_in_vllm"})


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def weights(seed: int = 0, rows: int = 2000) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("whole", [False, True])
def test_weights_are_the_same_wherever_they_lie_and_others_differ(tmp_path: Path, whole: bool) -> None:
    one = saved(tmp_path / "one", a=weights(1), b=weights(2))
    two = saved(tmp_path / "two", a=weights(1), b=weights(2))
    others = [
        saved(tmp_path / "tuned", a=weights(1), b=weights(3)),
        saved(tmp_path / "halved", a=weights(1).half(), b=weights(2)),
        saved(tmp_path / "renamed", a=weights(1), c=weights(2)),
        saved(tmp_path / "cut", a=weights(1), b=weights(2, 1999)),
    ]
    found = weights_fingerprint(one, whole=whole)
    assert weights_fingerprint(two, whole=whole) == found
    assert weights_fingerprint(two, whole=not whole) != found
    assert len({found, *(weights_fingerprint(each, whole=whole) for each in others)}) == 5


def test_every_byte_counts_where_all_are_read(tmp_path: Path) -> None:
    tensor = weights(1)
    one = weights_fingerprint(saved(tmp_path / "one", a=tensor), whole=True)
    tensor[0, 0] += 1
    assert weights_fingerprint(saved(tmp_path / "two", a=tensor), whole=True) != one


@pytest.mark.parametrize("raw", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", bytes(3 << 20)])
def test_a_file_of_any_other_format_is_told_by_size_and_samples(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    found = weights_fingerprint(tmp_path)
    assert found == weights_fingerprint(path)
    path.write_bytes(raw + b"x")
    assert weights_fingerprint(tmp_path) != found


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_weights_asks_for_a_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match='"weights"'):
        weights_fingerprint(tmp_path / folder)
