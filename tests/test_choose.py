"""Backend and block size are picked together when the pool is made, and said in one log line."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flash_doubles import FlashAttn2, FlashAttn3, FlashAttn4, Missing
from tiny import build
from transformers import GptOssConfig, GptOssForCausalLM

from hf_paged import LayerGeometry, PagePool
from hf_paged.kernels import BACKENDS, KERNELS, WRITERS, flash_find
from hf_paged.kernels import choose as choosing
from hf_paged.kernels.backend import ModuleBackend
from hf_paged.kernels.choose import choose
from hf_paged.kernels.flash import Flash2, Flash3, Flash4
from hf_paged.layout import needs_of
from hf_paged.state import CacheState

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DIMS = [(64, 64)]
FLASH = {"flash2": (Flash2, FlashAttn2), "flash3": (Flash3, FlashAttn3), "flash4": (Flash4, FlashAttn4)}
Machine = Callable[..., None]


def fake_triton(serves: bool = True) -> ModuleBackend:
    problem = lambda *args: None if serves else "the triton kernel needs triton"  # noqa: E731
    return ModuleBackend(types.SimpleNamespace(problem=problem, attention=None, write=None))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Pretend to be a GPU machine with these packages."""

    def pretend(capability: tuple[int, int], *installed: str, triton: bool = True) -> None:
        monkeypatch.setattr(choosing, "failure_of", lambda *args: None)
        monkeypatch.setattr(choosing, "cuda_capability", lambda device: capability if device.type == "cuda" else None)
        for name, (adapter, double) in FLASH.items():
            find = lambda version=adapter.version: flash_find.find(version)  # noqa: E731
            if name in installed:
                find = lambda name=name, double=double: flash_find.functions_of(double(), name)  # noqa: E731
            monkeypatch.setitem(BACKENDS, name, adapter(find, choosing.cuda_capability))
        monkeypatch.setitem(BACKENDS, "triton", fake_triton(triton))

    choosing._warn_once.cache_clear()
    choosing.substitute.cache_clear()
    yield pretend
    choosing.substitute.cache_clear()


@pytest.mark.parametrize(
    ("capability", "installed", "want"),
    [
        ((9, 0), ("flash2", "flash3", "flash4"), ("flash3", 128)),
        ((9, 0), ("flash2", "flash4"), ("flash2", 256)),
        ((9, 0), ("flash4",), ("flash4", 128)),
        ((8, 0), ("flash2", "flash3", "flash4"), ("flash2", 256)),
        ((8, 6), ("flash4",), ("triton", 16)),
        ((10, 0), ("flash2", "flash3", "flash4"), ("flash4", 128)),
        ((12, 0), ("flash3", "flash4"), ("triton", 16)),
        ((7, 5), ("flash2",), ("triton", 16)),
        ((9, 0), (), ("triton", 16)),
    ],
)
def test_on_gpus(capability: tuple[int, int], installed: tuple[str, ...], want: Any, machine: Machine) -> None:
    machine(capability, *installed)
    assert choose(None, None, CUDA, torch.bfloat16, DIMS)[:2] == want


def test_block_size_dtype_and_features_count(machine: Machine) -> None:
    machine((8, 0), "flash2")
    assert choose("auto", 512, CUDA, torch.float16, DIMS)[:2] == ("flash2", 512)
    assert choose("auto", 16, CUDA, torch.float16, DIMS)[:2] == ("triton", 16)
    assert choose("auto", None, CUDA, torch.float32, DIMS)[:2] == ("triton", 16)
    assert choose("auto", None, CUDA, torch.float16, [*DIMS, (512, 512)])[:2] == ("triton", 16)
    assert choose("auto", None, CUDA, torch.float16, DIMS, {"window", "softcap"})[:2] == ("flash2", 256)
    kernel, size, reason = choose("auto", None, CUDA, torch.float16, DIMS, {"sinks", "window"})
    assert (kernel, size) == ("triton", 16) and "flash2 has no sinks" in reason
    machine((9, 0), "flash2", "flash4")
    assert choose("auto", None, CUDA, torch.float16, DIMS, {"sinks"})[:2] == ("flash4", 128)


def test_explicit_pairs_that_cannot_be(machine: Machine) -> None:
    """Refused when the pool is made, with the sizes that work."""
    machine((8, 0), "flash2")
    layers = [LayerGeometry(2, 64, 64)]
    options: dict[str, Any] = dict(num_blocks=4, dtype=torch.float16, device="cuda")
    with pytest.raises(
        ValueError, match=r"kernel='flash2' cannot serve this pool: .*multiples of 256, not 16: use 256"
    ):
        PagePool(layers, kernel="flash2", block_size=16, **options)
    assert PagePool(layers, kernel="flash2", **options).block_size == 256
    with pytest.raises(ValueError, match=r"kernel='flash4' cannot serve this pool: FlashAttention 4 is not installed"):
        PagePool(layers, kernel="flash4", **options)
    with pytest.raises(ValueError, match="block_size=0 must be an int of at least 1"):
        PagePool(layers, block_size=0, **options)
    with pytest.raises(ValueError, match="kernel='fast' is not known: use 'auto' or one of"):
        PagePool(layers, kernel="fast", **options)
    with pytest.raises(ValueError, match=r"kernel='cpu' cannot serve this pool: the cpu kernel does not run on cuda"):
        PagePool(layers, kernel="cpu", **options)


def test_on_cpus() -> None:
    assert choose(None, None, CPU, torch.float32, [(64, 64), (64, 32)])[:2] == ("cpu", 16)
    assert choose("auto", 7, CPU, torch.bfloat16, DIMS)[:2] == ("cpu", 7)
    assert choose("reference", None, CPU, torch.float32, DIMS) == ("reference", 16, "asked for")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing that could be had is missing
        assert choose("auto", None, CPU, torch.float64, DIMS)[0] == "reference"
        assert choose("auto", None, torch.device("meta"), torch.float32, DIMS)[0] == "reference"
    with pytest.raises(ValueError, match=r"cannot serve.*multiples of 8 up to 256, not torch.float32 \(12, 64"):
        choose("cpu", None, CPU, torch.float32, [(12, 64)])


def test_slow_where_a_fast_kernel_could_be_had_is_said_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((9, 0), triton=False)
    with pytest.warns(
        UserWarning, match="slow reference kernel: FlashAttention 3 is not .*the triton kernel needs.*doctor"
    ):
        assert choose(None, None, CUDA, torch.bfloat16, DIMS)[:2] == ("reference", 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(None, None, CUDA, torch.bfloat16, DIMS)
    monkeypatch.setitem(BACKENDS, "cpu", Missing("no C++ compiler was found"))
    with pytest.warns(UserWarning, match="slow reference kernel: no C"):
        choose(None, None, CPU, torch.float32, DIMS)


def test_one_log_line_says_what_and_why(caplog: pytest.LogCaptureFixture, llama: Any) -> None:
    with caplog.at_level(logging.INFO, "hf_paged"):
        PagePool.for_model(llama, num_blocks=4, block_size=8)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hf_paged.pool"]
    assert "4 blocks of 8 tokens" in line and "kernel=cpu, compiled for" in line


def test_what_models_need() -> None:
    assert needs_of(build("llama")) == set()
    assert needs_of(build("gemma2")) == {"softcap"}  # windows are known from the layers
    with torch.device("meta"):
        config = GptOssConfig(hidden_size=32, num_hidden_layers=1, num_local_experts=2, intermediate_size=8)
        assert needs_of(GptOssForCausalLM(config)) == {"sinks"}


# ------------------------------------------------------------------------------------------------- large addresses


def test_slots_are_64_bit_numbers() -> None:
    """Frame x block size passes 2^32 long before there are 2^31 frames."""
    size, rows = 2**24, 300
    pool = PagePool([LayerGeometry(2, 8, 8)], num_blocks=rows, block_size=size)
    state = CacheState(pool)
    plan = state.begin(rows, 3)
    frames = np.array(state.tables.block_ids(), np.int64)  # [rows, 1]
    want = (frames * size + np.arange(3)).reshape(-1)
    assert want.max() > 2**32 and len(np.unique(want)) == 3 * rows
    slots, index = plan.on(CPU).slots, plan.dense_index(CPU)[0]
    assert slots.dtype == index.dtype == torch.int64
    assert np.array_equal(slots.numpy(), want) and np.array_equal(index.numpy(), want)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_pools_beyond_2_to_the_31_numbers(kernel: str) -> None:
    """The memory is reserved only: two frames of it are ever touched. In 32 bits their addresses would wrap to frame 0."""
    blocks = 2**32 // (16 * 64) + 2
    try:
        k_pool, v_pool = (torch.empty(blocks, 16, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 1, 20, 64, generator=generator).bfloat16() for _ in range(2))
    slots = torch.arange(20) + (blocks - 2) * 16
    WRITERS[kernel](k_pool, v_pool, key, value, slots, None)
    assert torch.equal(k_pool[blocks - 2 :].flatten(0, 1)[:20], key[0].transpose(0, 1))
    q = torch.randn(1, 1, 64, generator=generator).bfloat16()
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([[blocks - 2, blocks - 1]], [20], [0, 1])]
    out = KERNELS[kernel](q, k_pool, v_pool, *numbers, 0.125, 0, 0.0, None, 1, 20)
    want = torch.nn.functional.scaled_dot_product_attention(q[None], key[0], value[0], scale=0.125)
    torch.testing.assert_close(out.float(), want[0].float(), atol=1e-2, rtol=1e-2)
