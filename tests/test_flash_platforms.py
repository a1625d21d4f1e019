"""What the FlashAttention adapters do on ROCm, on a device that is not the current one, and with what modules export."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from flash_doubles import DOUBLES
from test_flash import CASES, make

from hf_paged.kernels import BACKENDS, KERNELS, choose
from hf_paged.kernels.choose import problem_of
from hf_paged.kernels.flash_find import Functions

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composable Kernel takes a soft cap and ignores it; an MI300 reports the capability 9.4 of no Hopper."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(choose, "cuda_capability", lambda device: (9, 4))
    assert choose.candidates(CUDA) == ("flash2", "triton", "reference")
    half = torch.float16
    assert problem_of("double2", CPU, half, [(64, 64)], 256, {"window"}) is None
    assert problem_of("double2", CPU, half, [(64, 64)], 256, {"softcap"}) == "double2 has no softcap"
    for name in ("double3", "double4"):
        assert "does not run on ROCm" in str(BACKENDS[name].problem(CPU, half, 64, 64, 128))
    DOUBLES["double2"].calls.clear()
    KERNELS["double2"](*make("double2", CASES["decode"], 256).values())
    assert DOUBLES["double2"].calls[0][0] == "with_kvcache"  # there its other function splits nothing


@pytest.mark.parametrize("kernel", ["double2", "double3", "double4"])
def test_the_device_of_the_queries_is_current(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Any:
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    seen: list[list[Any]] = []
    record = DOUBLES[kernel].record
    monkeypatch.setattr(DOUBLES[kernel], "record", lambda *args: (seen.append(list(current)), record(*args)))
    KERNELS[kernel](*make(kernel, CASES["decode"], BACKENDS[kernel].block_size).values())
    assert seen == [[CPU]]


def test_the_sums_of_the_plan_are_used() -> None:
    """They need not be added up again in every layer."""
    arguments = make("double2", CASES["mixed"], 256)
    sums = torch.nn.functional.pad(arguments["seq_lens"].cumsum(0), (1, 0)).int()
    DOUBLES["double2"].calls.clear()
    KERNELS["double2"](*arguments.values(), sums)
    assert DOUBLES["double2"].calls[0][1]["cu_seqlens_k"].data_ptr() == sums.data_ptr()


def test_operators_without_a_signature_accept_nothing() -> None:
    """As modules of the Hub export them: they are passed over, and nothing raises."""
    operator: Any = torch.ops.aten.mm
    assert not Functions(operator, operator, "").accepts("block_table")
    assert not Functions(max, None, "").accepts("block_table")
