"""The weights that an engine serves are told apart by their files, wherever these lie."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import forks
from kvarve.connectors.checkpoint import local_files, weights_fingerprint
from kvarve.errors import ConfigError


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
    if whole:
        one = saved(tmp_path / "one", a=weights(1).index_add(0, torch.tensor([0]), torch.ones(1, 16)), b=weights(2))
        assert weights_fingerprint(one, whole=True) != found, "every byte counts where all are read"


@pytest.mark.parametrize("raw", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", bytes(3 << 20)])
def test_a_file_of_any_other_format_is_told_by_size_and_samples(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    found = weights_fingerprint(tmp_path)
    assert found == weights_fingerprint(path)
    path.write_bytes(raw + b"x")
    assert weights_fingerprint(tmp_path) != found


HEADER = b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[%s]}}'


@pytest.mark.parametrize("span", [b"-9,9", b"9,0", b"0,99", b"0,1" + b"0" * 30, b"0", b'"0","9"', b"null"])
def test_a_header_that_points_outside_its_file_is_no_header(tmp_path: Path, span: bytes) -> None:
    prints = set()
    for content in (b"123456789", b"987654321"):
        header = HEADER % span
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
        prints.add(weights_fingerprint(tmp_path))
    assert len(prints) == 2


@pytest.mark.parametrize("model", ["no/such-model-here", "dummy", "s3://bucket/name", "/no/folder"])
def test_a_model_that_is_nowhere_asks_for_a_name_of_its_weights(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='set "weights"'):
        local_files(model)
    with pytest.raises(ConfigError, match='"weights"'):
        weights_fingerprint(tmp_path)


def test_a_process_began_when_it_was_started(tmp_path: Path) -> None:
    """To a tick of the clock: files that were written right before are older."""
    (tmp_path / "before").touch()
    code = "from kvarve.connectors.checkpoint import began_s; print(began_s())"
    found = float(forks.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    (tmp_path / "after").touch()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert (tmp_path / "before").stat().st_ctime - 2 * tick_s <= found <= (tmp_path / "after").stat().st_ctime
