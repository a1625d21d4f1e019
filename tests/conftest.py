"""Fixtures: one small model of each kind per session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which transformers does

import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
torch.set_num_threads(1)  # the models are tiny: a second thread only spins

_models: dict[str, Any] = {}


@pytest.fixture
def model_of() -> Callable[[str], Any]:
    """The tiny model of a kind, under "paged"."""

    def get(kind: str) -> Any:
        if kind not in _models:
            _models[kind] = tiny.build(kind)
        _models[kind].set_attn_implementation("paged")
        return _models[kind].eval()

    return get


@pytest.fixture
def llama(model_of: Callable[[str], Any]) -> Any:
    return model_of("llama")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    from smollm2 import load

    model, tokenizer = load(dtype=torch.float32, attn_implementation="paged")
    return model, tokenizer


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Blocks must come back by themselves, not when the garbage collector happens to run."""
    gc.disable()
    yield
    gc.enable()
