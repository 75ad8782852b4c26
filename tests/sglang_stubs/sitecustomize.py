"""Loaded by a Python that serves SGLang on a processor: stands in for packages of which only GPU builds exist.

Every name of theirs is there, so that what imports them starts; whoever calls one is told what it stands for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "sgl_kernel")


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not on a processor")


class _Stub(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _hash(seeds: Any, positions: Any, columns: Any) -> Any:
    """Stand in for the kernel that hashes seed, position and token to 32 bits (rows, tokens)."""
    mixed = seeds.long()[:, None] * 0x9E3779B1 + positions.long()[:, None] * 0x85EBCA77 + columns[None] * 0xC2B2AE3D
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = mixed & 0xFFFFFFFF
        mixed = (mixed ^ (mixed >> 16)) * factor
    mixed = mixed & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


_FOR_SEEDS: dict[str, Callable[[Any], object]] = {
    "sglang.srt.arg_groups.choices": lambda its: its.add_deterministic_attention_backend_choices(["torch_native"]),
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": lambda its: setattr(
        its, "enable_batch_invariant_mode", lambda: None
    ),
    "sglang.kernels.ops.sampling.murmur_hash": lambda its: setattr(its, "murmur_hash32", _hash),
}


class _Seeds(importlib.abc.MetaPathFinder):
    """Lets a processor have the mode in which seeds are heeded, with torch's own operators."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _FOR_SEEDS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec and spec.loader
        load = loader.exec_module
        loader.exec_module = lambda module: (load(module), _FOR_SEEDS[name](module))
        return spec


sys.meta_path.append(_Stubs())
if os.environ.get("TOOLBOX_SGLANG_SEEDS"):
    sys.meta_path.insert(0, _Seeds())
