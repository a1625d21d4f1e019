"""Every backend that serves on this GPU, against dense attention in float32: random shapes, permuted tables, NaN in what
must not be read, and pools of more than 2**31 numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import DEVICE, DRY_RUN, serving, skip_without_gpu
from test_kernels import Case, make
from test_triton import draw, hide, own
from torch import Tensor

from hf_paged.kernels import BACKENDS, KERNELS, WRITERS, reference, trial
from hf_paged.kernels.backend import SINKS, SOFTCAP
from hf_paged.kernels.choose import problem_of

skip_without_gpu()

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVING = [(name, dtype) for dtype in DTYPES for name in serving(dtype, 64)]
CASES = 4 if DRY_RUN else 40  # random ones per backend and dtype
TRITON_CASES = 12  # each is compiled first


def adapted(case: Case, name: str, dtype: torch.dtype, seed: int) -> Case:
    """The case as this backend can serve it."""
    backend = BACKENDS[name]
    dims = case.dims if name in ("reference", "triton") else ((case.dims[0] + 15) // 16 * 16,) * 2
    block_size = backend.block_size if seed % 2 else case.block_size
    if problem_of(name, DEVICE, dtype, [dims], block_size):
        block_size = backend.block_size
    softcap = case.softcap if SOFTCAP in backend.features else 0.0
    return case._replace(
        dtype=dtype, dims=dims, block_size=block_size, softcap=softcap, sinks=case.sinks and SINKS in backend.features
    )


def moved(arguments: dict[str, Any]) -> list[Any]:
    return [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments.values()]


@pytest.mark.parametrize(("name", "dtype"), SERVING, ids=str)
def test_random_shapes(name: str, dtype: torch.dtype) -> None:
    failures = []
    for seed in range(min(CASES, TRITON_CASES) if name == "triton" else CASES):
        case = adapted(draw(seed)[0], name, dtype, seed)
        if problem_of(name, DEVICE, dtype, [case.dims], case.block_size):
            continue
        arguments, exact, low = make(case, seed)
        if BACKENDS[name].needs_zeroed_frames:
            for pool in ("k_pool", "v_pool"):
                arguments[pool].nan_to_num_(0.0)
        elif name in ("triton", "cpu"):  # these do not even read what left the window
            hide(arguments)
        out = KERNELS[name](*moved(arguments)).cpu()
        error = (out.float() - exact).abs().max()
        allowed = torch.tensor(2e-5)
        if dtype != torch.float32:
            rounding = torch.finfo(dtype).eps / 2 * exact.abs().max()
            allowed = 2 * torch.maximum((low.float() - exact).abs().max(), rounding)
        if not error <= allowed:
            failures.append(f"seed {seed}, {case}: error {error:.2e}, allowed {allowed:.2e}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_installed_passes_its_trial(dtype: torch.dtype) -> None:
    """A backend that does not would be missing from the other tests here."""
    for name, backend in BACKENDS.items():
        if DRY_RUN and name == "triton":
            continue
        if backend.problem(DEVICE, dtype, 64, 64, backend.block_size) is None:
            arguments = name, DEVICE, dtype, 64, 64, backend.block_size, backend.features
            assert trial.failure_of(*arguments) is None


@pytest.mark.parametrize("name", serving(torch.bfloat16, 64))
def test_new_tokens_are_written_where_they_belong(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    size = BACKENDS[name].block_size
    pools = [torch.full((5, size, 2, 64), float("nan"), dtype=torch.bfloat16) for _ in range(2)]
    key, value = (torch.randn(2, 2, 7, 64, generator=generator).bfloat16() for _ in range(2))
    slots = torch.randperm(5 * size, generator=generator)[:9]
    source = torch.randperm(14, generator=generator)[:9].sort().values
    there = [pool.to(DEVICE, copy=True) for pool in pools]
    WRITERS[name](*there, *(x.to(DEVICE) for x in (key, value, slots, source)))
    reference.write(*pools, key, value, slots, source)
    for written, expected in zip(there, pools):
        assert torch.equal(written.cpu().nan_to_num(123.0), expected.nan_to_num(123.0))


@pytest.mark.parametrize("name", serving(torch.bfloat16, 128))
def test_pools_beyond_32_bits(name: str) -> None:
    """The last frames of a pool, which begin beyond number 2**31. 9 GB."""
    size, heads, dim = BACKENDS[name].block_size, 8, 128
    frames = 12 if DRY_RUN else 2**31 // (size * heads * dim) + 12
    if not DRY_RUN and torch.cuda.mem_get_info(DEVICE)[0] < 12e9:
        pytest.skip("less than 12 GB of GPU memory are free")
    make_pool = torch.zeros if BACKENDS[name].needs_zeroed_frames else torch.empty
    k_pool, v_pool = (make_pool(frames, size, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    length = 4 * size - 3
    table = frames - 1 - torch.tensor([[2, 0, 5, 4], [1, 3, 6, 7]], dtype=torch.int32)
    position = torch.arange(length)
    slots = (table.long()[:, position // size] * size + position % size).reshape(-1)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, heads, length, dim, generator=generator).bfloat16() for _ in range(2))
    WRITERS[name](k_pool, v_pool, *(x.to(DEVICE) for x in (key, value, slots)), None)
    q = torch.randn(2, 16, dim, generator=generator).bfloat16()
    lengths, starts = torch.tensor([length] * 2, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    rest = (dim**-0.5, 0, 0.0, None, 1, length)
    out = KERNELS[name](q.to(DEVICE), k_pool, v_pool, *(x.to(DEVICE) for x in (table, lengths, starts)), *rest)
    keys, values = (x.repeat_interleave(2, 1).float() for x in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(q.float()[:, :, None], keys, values)[:, :, 0]
    assert (out.cpu().float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("name", serving(torch.bfloat16, 64))
def test_another_device_is_current(name: str) -> None:
    """The kernel runs where its tensors are."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    case = Case([70, 33], [1, 1], dims=(64, 64), block_size=BACKENDS[name].block_size, dtype=torch.bfloat16)
    arguments, _, _ = make(case)
    for pool in ("k_pool", "v_pool"):
        arguments[pool].nan_to_num_(0.0)
    want = reference.attention(**own(arguments))
    with torch.cuda.device(1):
        out = KERNELS[name](*moved(arguments))
    assert out.device == DEVICE and (out.cpu().float() - want.float()).abs().max() < 0.02
