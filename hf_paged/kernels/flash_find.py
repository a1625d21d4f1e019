"""The functions of FlashAttention 2, 3 and 4, where they are installed already. Nothing is ever downloaded."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from hf_paged.compat import flash_attention_installed

from .build import KernelUnavailable


class Package(NamedTuple):
    """Where a version lives."""

    distribution: str
    module: str
    hub: str  # a build for the `kernels` package
    install: str  # what to tell who has none


PACKAGES = {
    2: Package("flash-attn", "flash_attn", "kernels-community/flash-attn2", "pip install flash-attn"),
    3: Package(
        "flash-attn-3",
        "flash_attn_interface",
        "kernels-community/vllm-flash-attn3",
        "build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
    ),
    4: Package("flash-attn-4", "flash_attn.cute", "kernels-community/flash-attn4", "pip install flash-attn-4"),
}


class Functions(NamedTuple):
    """The entry points of one version. `with_kvcache` is None where it has none."""

    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any] | None
    source: str  # name and version, for people

    def accepts(self, argument: str) -> bool:
        """Whether the function that reads block tables knows this argument."""
        try:
            return argument in inspect.signature(self.with_kvcache or self.varlen).parameters
        except (TypeError, ValueError):  # a plain operator of torch, as some modules of the Hub export
            return False


def find(version: int) -> Functions:
    """FlashAttention `version` from its package, or from a Hub kernel that was loaded in this process before.

    transformers' own loader would do the same, but where it finds no package it downloads a kernel.

    Raises `KernelUnavailable`, saying what to install.
    """
    package = PACKAGES[version]
    if flash_attention_installed(version):
        try:
            module = importlib.import_module(package.module)
            source = f"{package.distribution} {importlib.metadata.version(package.distribution)}"
            return functions_of(module, source)
        except Exception as error:  # whatever a half-built extension raises
            raise KernelUnavailable(f"{package.distribution} is installed but cannot be used: {error}") from error
    for module, name in _loaded_hub_kernels():
        functions = getattr(module, "flash_attn_varlen_func", None) and functions_of(module, name)
        if functions and version_of(functions) == version:
            return functions
    raise KernelUnavailable(
        f"FlashAttention {version} is not installed ({package.install}, or load a build of it first: "
        f"kernels.get_kernel('{package.hub}', ...))"
    )


def functions_of(module: ModuleType, source: str) -> Functions:
    """The entry points of a module of any of the three versions."""
    return Functions(module.flash_attn_varlen_func, getattr(module, "flash_attn_with_kvcache", None), source)


def version_of(functions: Functions) -> int | None:
    """Which version these are, by what they take: a build from the Hub may have any name."""
    if functions.with_kvcache is None:
        return 4 if functions.accepts("page_table") else None
    return 3 if functions.accepts("page_table") else 2 if functions.accepts("block_table") else None


def _loaded_hub_kernels() -> list[tuple[ModuleType, str]]:
    loaded: list[Any] = getattr(sys.modules.get("kernels"), "get_loaded_kernels", list)()
    return [(kernel.module, f"{kernel.metadata.name} from the Hub") for kernel in loaded]
