"""SGLang's HiCache on a machine without a GPU: importable, with the copies between device and host done by torch.

All of SGLang's modules are the real ones. Replaced are: modules of its dependencies that no test needs (torchvision and
others, where they are not installed), pinned memory, the memory that SGLang leaves to others (10 GB), the copy kernels,
and a module that it would compile. No test stands here.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from array import array
from typing import Any

_NOT_NEEDED = (
    "torchvision",
    "datasets",
    "soundfile",
    "evaluate",
    "pandas",
    "av",
    "decord",
)
# Of a server that computes on a CPU, beside those.
_NOT_SERVED = (
    "sgl_kernel",
    "xgrammar",
    "jsonschema",
    "openai_harmony",
    "torchao",
    "llguidance",
    "einops",
    "timm",
    "scipy",
)


class _Anything(type):
    """The type of classes that have every attribute, so that they may be used as decorators, bases and names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}


class _EmptyModule(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: set[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] in self.absent:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _one_by_one(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _pages(tokens: Any, page_size: int) -> list[int]:
    return tokens[::page_size].tolist()  # type: ignore[no-any-return]


def _to_page_first(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """All layers of device buffers to host buffers [page, layer, token, ...]."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, host in enumerate(dst_ptrs):
        for layer in range(layers):
            device = src_ptrs[number * layers + layer]
            if page_size == 1:
                host[dst_indices, layer] = device[src_indices].view_as(host[dst_indices, layer])
                continue
            for a, b in zip(_pages(src_indices, page_size), _pages(dst_indices, page_size), strict=True):
                page = host[b // page_size, layer]
                page.copy_(device[a : a + page_size].view_as(page))


def _from_page_first(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of host buffers [page, layer, token, ...] to device buffers."""
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        if page_size == 1:
            device[dst_indices] = host[src_indices, layer_id].view_as(device[dst_indices])
            continue
        for a, b in zip(_pages(src_indices, page_size), _pages(dst_indices, page_size), strict=True):
            slots = device[b : b + page_size]
            slots.copy_(host[a // page_size, layer_id].view_as(slots))


class _Hashes:
    """Names of pages as SGLang makes them, which would compile a module for it: a chain of SHA-256 over the tokens."""

    def get_hash(
        self, raw: Any, tokens: int, width: int, is_bigram: bool, prior: bytes | None, page_size: int | None
    ) -> str | list[str]:
        assert not is_bigram, "no draft model is run here"
        digest, found = prior or b"", []
        for at in range(0, tokens, page_size or tokens):
            page = raw[at * width : min(at + (page_size or tokens), tokens) * width]
            digest = hashlib.sha256(digest + array("I", page).tobytes()).digest()
            found.append(digest.hex())
        return found if page_size else found[0]


class _HashesFinder(importlib.machinery.PathFinder):
    """Has a server's processes name pages by `_Hashes`, when they come to import that module."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "sglang.srt.mem_cache.cpp_utils.native_hash":
            return None
        spec: Any = super().find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            module._load_native_hash_module = _Hashes

        spec.loader.exec_module = executed
        return spec


def _replace(names: tuple[str, ...]) -> None:
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")  # use the library of the wheel
    absent = {name for name in names if importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, _Finder(absent))


def prepare_server() -> None:
    """The same for a process of a server with kvarve's linker, which needs none of the copies replaced."""
    _replace(_NOT_NEEDED + _NOT_SERVED)
    sys.meta_path.insert(0, _HashesFinder)


def prepare() -> None:
    """Call it before anything of SGLang is imported."""
    _replace(_NOT_NEEDED)
    logging.getLogger("sglang").setLevel(logging.ERROR)

    import torch

    torch.set_num_threads(1)
    from sglang.srt.mem_cache.cpp_utils import native_hash
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba, mha, mla
    from sglang.test.kits.unified_radix_cache import fixtures

    def nothing(*_: object, **__: object) -> None: ...

    native_hash._load_native_hash_module = _Hashes
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common._cuda_host_register = nothing
    common._cuda_host_unregister = base._cuda_host_unregister = nothing
    for module in (mha, mla, dsa, mamba):
        module.transfer_kv_direct = _one_by_one
        module.transfer_kv_all_layer_direct_lf_pf = _to_page_first
        module.transfer_kv_per_layer_direct_pf_lf = _from_page_first
    fixtures.get_device = lambda *_, **__: "cpu"
