"""What the tests of this folder run on. `HF_PAGED_DRY_RUN=1` runs what it can on the CPU, to test the tests."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
import torch

from hf_paged.kernels import BACKENDS
from hf_paged.kernels.choose import problem_of

DRY_RUN = os.environ.get("HF_PAGED_DRY_RUN") == "1" and not torch.cuda.is_available()
DEVICE = torch.device("cpu") if DRY_RUN else torch.device("cuda", 0)


def skip_without_gpu() -> None:
    """At the head of a module: it needs a GPU."""
    if not torch.cuda.is_available() and not DRY_RUN:
        pytest.skip("no CUDA device here", allow_module_level=True)


def serving(dtype: torch.dtype, dim: int, needs: Collection[str] = ()) -> list[str]:
    """The backends that serve this dtype and head dim here, each with the block size that suits it. In a dry run Triton's
    interpreter is left out."""
    names = [name for name in BACKENDS if not (DRY_RUN and name == "triton")]
    return [
        name
        for name in names
        if problem_of(name, DEVICE, dtype, [(dim, dim)], BACKENDS[name].block_size, needs) is None
    ]
