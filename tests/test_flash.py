"""The FlashAttention adapters over doubles of versions 2.8.3, 3 and 4 (flash_doubles.py), against the reference kernel."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from flash_doubles import DOUBLES, FlashAttn2, FlashAttn3, FlashAttn3WithSinks, FlashAttn4
from tiny import build, default, paged, prompts
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from hf_paged import LayerGeometry, PagePool
from hf_paged.kernels import BACKENDS, KERNELS, WRITERS, KernelUnavailable, flash_find
from hf_paged.kernels.flash import Flash2, Flash3, Flash4
from hf_paged.kernels.flash_find import Functions

SIZES = [("double2", 256), ("double3", 128), ("double3", 16), ("double3s", 128), ("double4", 128), ("double4", 16)]
UNUSED = -1


class Case(NamedTuple):
    lengths: list[int]  # tokens stored per row
    queries: list[int]  # of which the last ones ask
    heads: tuple[int, int] = (4, 2)  # query and key/value heads
    dims: tuple[int, int] = (16, 16)  # of keys and values
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "decode": Case([1, 5, 300, 256], [1, 1, 1, 1]),
    "decode of one row": Case([270], [1]),
    "prefill": Case([9, 4, 30], [9, 4, 30]),
    "even prefill with a past": Case([60, 258], [3, 3]),
    "mixed": Case([9, 300, 30, 5], [3, 1, 30, 0]),
    "as many queries as rows": Case([9, 270], [2, 0]),
    "at most one query": Case([9, 7, 270], [1, 0, 1]),
    "empty row": Case([0, 6], [0, 2]),
    "nothing stored": Case([0, 0], [0, 0]),
    "more queries than tokens": Case([3, 20], [5, 2]),
    "multi-query": Case([7, 280], [7, 1], heads=(6, 1)),
    "multi-query decode": Case([7, 280], [1, 1], heads=(6, 1)),
    "padded dims": Case([7, 280], [7, 1], dims=(20, 12)),
    "padded dims, decode": Case([7, 280], [1, 1], dims=(100, 100), heads=(2, 1)),
    "window": Case([9, 310, 530], [9, 3, 1], window=5),
    "window, decode": Case([9, 310, 530], [1, 1, 1], window=40),
    "window of 1": Case([9, 30], [9, 2], window=1),
    "softcap": Case([9, 280], [9, 1], softcap=2.0),
    "float16": Case([9, 280], [1, 1], dtype=torch.float16),
    "sinks": Case([9, 280], [9, 1], sinks=True),
    "sinks, float16": Case([9, 280], [1, 1], sinks=True, dtype=torch.float16),
    "one head per group": Case([9, 280], [1, 1], heads=(2, 2)),
    "all at once": Case([9, 300, 1], [9, 4, 1], window=6, softcap=3.0, sinks=True, dims=(32, 16), heads=(6, 2)),
}


def storage(kernel: str, case: Case, block_size: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The tensors that a pool of this backend gives to one layer."""
    layer = LayerGeometry(case.heads[1], *case.dims)
    pool = PagePool([layer], num_blocks=num_blocks, block_size=block_size, dtype=case.dtype, kernel=kernel)
    new = [torch.empty(1, case.heads[1], 0, dim, dtype=case.dtype) for dim in case.dims]
    return pool.storage_for(0, *new)[:2]


def make(kernel: str, case: Case, block_size: int, seed: int = 0) -> dict[str, Any]:
    """Arguments over permuted frames of a pool that has spare ones. Entries of the table that no query needs are unused."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in case.lengths]
    frames = torch.randperm(sum(blocks) + 3, generator=generator).int()
    k_pool, v_pool = storage(kernel, case, block_size, len(frames))
    unused = 0 if BACKENDS[kernel].needs_zeroed_frames else UNUSED  # 3 and 4 read, and mask, what lies before a window
    table = torch.full((len(blocks), max(blocks)), unused, dtype=torch.int32)
    used = 0
    for row, (length, queries) in enumerate(zip(case.lengths, case.queries)):
        mine = frames[used : used + blocks[row]]
        used += blocks[row]
        first = max(0, length - queries - case.window + 1) // block_size if case.window else 0
        table[row, first : len(mine)] = mine[first:]
        for pool in (k_pool, v_pool):
            tokens = torch.randn(length, *pool.shape[2:], generator=generator).to(case.dtype)
            for block in range(first, len(mine)):
                here = tokens[block * block_size : (block + 1) * block_size]
                pool[mine[block], : len(here)] = here
    return dict(
        q=torch.randn(sum(case.queries), case.heads[0], case.dims[0], generator=generator).to(case.dtype),
        k_pool=k_pool,
        v_pool=v_pool,
        block_table=table,
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *case.queries]).cumsum(0).int(),
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=torch.randn(case.heads[0], generator=generator) if case.sinks else None,
        max_seqlen_q=max(case.queries),
        max_seqlen_k=max(case.lengths),
    )


def expected(arguments: dict[str, Any]) -> Tensor:
    """By the reference kernel in float32."""
    floats = {name: value.float() for name, value in arguments.items() if name in ("q", "k_pool", "v_pool")}
    if arguments["sinks"] is not None:  # the adapters round them, as gpt-oss stores them
        floats["sinks"] = arguments["sinks"].bfloat16().float()
    return KERNELS["reference"](*{**arguments, **floats}.values())


def poison(arguments: dict[str, Any], value: float) -> None:
    """Fill every slot that no row uses."""
    size = arguments["k_pool"].shape[1]
    used = torch.zeros(arguments["k_pool"].shape[:2], dtype=torch.bool)
    for row, length in enumerate(arguments["seq_lens"].tolist()):
        for position in range(length):
            frame = int(arguments["block_table"][row, position // size])
            if frame != UNUSED:
                used[frame, position % size] = True
    for pool in (arguments["k_pool"], arguments["v_pool"]):
        pool[~used] = value


SERVED = [
    (kernel, size, name)
    for kernel, size in SIZES
    for name, case in CASES.items()
    if not case.sinks or "sinks" in BACKENDS[kernel].features
]


@pytest.mark.parametrize(("kernel", "block_size", "name"), SERVED)
def test_equals_the_reference(kernel: str, block_size: int, name: str) -> None:
    case = CASES[name]
    arguments = make(kernel, case, block_size)
    if not BACKENDS[kernel].needs_zeroed_frames:
        poison(arguments, float("nan"))
    out, want = KERNELS[kernel](*arguments.values()), expected(arguments)
    assert out.dtype == case.dtype and out.shape == want.shape and out.is_contiguous()
    torch.testing.assert_close(out.float(), want, atol=8e-3, rtol=1e-2)
    if name == "more queries than tokens":
        assert (out[:2] == 0).all() and (out[2:] != 0).any()


@pytest.mark.parametrize(("kernel", "leaks"), [("double2", False), ("double3", True), ("double4", True)])
def test_nan_in_unused_slots(kernel: str, leaks: bool) -> None:
    """Why pools for versions 3 and 4 begin with zeros, and one for version 2 need not."""
    arguments = make(kernel, CASES["decode"], BACKENDS[kernel].block_size)
    poison(arguments, float("nan"))
    assert KERNELS[kernel](*arguments.values()).isnan().any() == leaks
    assert BACKENDS[kernel].needs_zeroed_frames == leaks
    with_zeros = make(kernel, CASES["decode"], BACKENDS[kernel].block_size)
    if leaks:
        assert (with_zeros["k_pool"].count_nonzero(dim=(2, 3)) > 0).sum() == sum(CASES["decode"].lengths)


def calls_of(kernel: str, case: Case) -> list[tuple[str, dict[str, Any]]]:
    calls = DOUBLES[kernel].calls
    calls.clear()
    KERNELS[kernel](*make(kernel, case, BACKENDS[kernel].block_size).values())
    return calls


def test_which_function_is_called() -> None:
    """Version 2: a function that splits long rows wherever every row asks as often, and of two the one that never waits."""
    for name in ("decode", "decode of one row", "multi-query decode", "float16"):
        ((function, arguments),) = calls_of("double2", CASES[name])
        assert function == "varlen" and arguments["max_seqlen_q"] == 1
        assert arguments["cu_seqlens_k"].diff().tolist() == CASES[name].lengths
    for name in ("one head per group", "window, decode", "even prefill with a past"):
        ((function, arguments),) = calls_of("double2", CASES[name])
        assert function == "with_kvcache" and arguments["q"].shape[0] == len(CASES[name].lengths)
    for name in ("mixed", "as many queries as rows", "at most one query"):
        ((function, arguments),) = calls_of("double2", CASES[name])
        assert function == "varlen" and arguments["max_seqlen_q"] == max(2, *CASES[name].queries)
        assert arguments["max_seqlen_k"] == max(CASES[name].lengths)
    ((_, arguments),) = calls_of("double3", CASES["mixed"])
    assert arguments["q"].ndim == 3 and arguments["max_seqlen_q"] == 30
    ((_, arguments),) = calls_of("double3", CASES["decode"])
    assert arguments["q"].shape == (4, 1, 4, 16) and arguments["cu_seqlens_q"] is None
    ((_, arguments),) = calls_of("double4", CASES["decode"])
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"], arguments["num_splits"]) == (1, 300, 1)
    assert calls_of("double2", CASES["nothing stored"]) == []


def test_version_4_splits_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DOUBLES["double4"], "capability", (10, 0))
    assert calls_of("double4", CASES["decode"])[0][1]["num_splits"] == 0
    assert calls_of("double4", CASES["mixed"])[0][1]["num_splits"] == 1


def test_head_dims_are_padded_in_place() -> None:
    """No call copies the pool: what it passes on is the pool's memory, with zeros behind each head."""
    for kernel, dims in (("double2", (104, 104)), ("double3", (104, 104)), ("double4", (112, 112))):
        arguments = make(kernel, CASES["padded dims, decode"], BACKENDS[kernel].block_size)
        DOUBLES[kernel].calls.clear()
        KERNELS[kernel](*arguments.values())
        ((_, passed),) = DOUBLES[kernel].calls
        keys, values = (passed.get(f"{name}_cache", passed[name]) for name in "kv")
        assert (keys.shape[-1], values.shape[-1]) == dims
        assert keys.data_ptr() == arguments["k_pool"].data_ptr() and (keys[..., 100:] == 0).all()
        assert values.data_ptr() == arguments["v_pool"].data_ptr() and (values[..., 100:] == 0).all()
    arguments["k_pool"] = arguments["k_pool"].contiguous()
    with pytest.raises(ValueError, match=r"a pool of head dim 100 needs room for 112 numbers per head, has 100"):
        KERNELS["double4"](*arguments.values())


@pytest.mark.parametrize("kernel", ["double2", "double3", "double4"])
def test_queries_that_need_no_padding_are_not_copied(kernel: str) -> None:
    arguments = make(kernel, CASES["decode"], BACKENDS[kernel].block_size)
    DOUBLES[kernel].calls.clear()
    KERNELS[kernel](*arguments.values())
    ((_, passed),) = DOUBLES[kernel].calls
    assert passed["q"].data_ptr() == arguments["q"].data_ptr()


def test_bytes_count_the_padding() -> None:
    layers = [LayerGeometry(2, 20, 12)]
    pool = PagePool(layers, memory="1MiB", dtype=torch.bfloat16, kernel="double2")
    assert pool.bytes_per_block == 256 * 2 * (24 + 24) * 2 and pool.num_blocks == 2**20 // pool.bytes_per_block
    assert PagePool(layers, num_blocks=1, kernel="reference").bytes_per_block == 16 * 2 * 32 * 4


@pytest.mark.parametrize(("kernel", "block_size"), SIZES)
def test_a_missing_column_is_noticed(kernel: str, block_size: int) -> None:
    """The doubles do see what the adapters hand over: a table too short is no silent success."""
    arguments = make(kernel, Case([300, 9], [1, 1]), block_size)
    arguments["block_table"] = arguments["block_table"][:, :-1]
    with pytest.raises(RuntimeError, match="too few columns"):
        KERNELS[kernel](*arguments.values())


@pytest.mark.parametrize("kernel", ["double2", "double3", "double4"])
def test_write_and_operators(kernel: str) -> None:
    """Tokens land where the contract says, also in a padded pool; what torch.compile relies on is declared."""
    case = CASES["padded dims"]
    k_pool, v_pool = storage(kernel, case, BACKENDS[kernel].block_size, 3)
    key, value = torch.randn(2, 2, 3, 20).to(case.dtype), torch.randn(2, 2, 3, 12).to(case.dtype)
    slots, source = torch.tensor([300, 0, 7]), torch.tensor([1, 2, 5])
    WRITERS[kernel](k_pool, v_pool, key, value, slots, source)
    for pool, new in ((k_pool, key), (v_pool, value)):
        flat = pool.view(-1, *pool.shape[2:])
        for slot, token in zip(slots.tolist(), source.tolist()):
            assert torch.equal(flat[slot], new[token // 3, :, token % 3])
    arguments = tuple(make(kernel, case, BACKENDS[kernel].block_size).values())
    torch.library.opcheck(KERNELS[kernel], arguments, test_utils=("test_schema", "test_faketensor"))


# ---------------------------------------------------------------------------------------------------------- generate


@pytest.fixture(scope="module")
def half() -> Callable[[str], Any]:
    models: dict[str, Any] = {}

    def get(kind: str) -> Any:
        models[kind] = models.get(kind) or build(kind, dtype=torch.float16)
        return models[kind]

    return get


GENERATE = {
    "greedy": dict(max_new_tokens=6),
    "beams": dict(max_new_tokens=6, num_beams=3, num_return_sequences=2),
    "lookup": dict(max_new_tokens=6, prompt_lookup_num_tokens=3),
}


@pytest.mark.parametrize("mode", GENERATE)
@pytest.mark.parametrize(("kernel", "block_size"), SIZES)
def test_generate(kernel: str, block_size: int, mode: str, half: Callable[[str], Any]) -> None:
    """Ragged prompts, packed prefill included: the default cache's tokens, and no layer by another kernel."""
    model, inputs = half("llama"), prompts([5, 30, 8] if mode != "lookup" else [30])
    pool = PagePool.for_model(model, num_blocks=60, block_size=block_size, kernel=kernel)
    DOUBLES[kernel].calls.clear()
    out = paged(model, inputs, pool, **GENERATE[mode])
    assert torch.equal(out, default(model, inputs, **GENERATE[mode]))
    assert len(DOUBLES[kernel].calls) >= 6


@pytest.mark.parametrize(("kernel", "block_size"), SIZES)
@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_generate_with_windows(kind: str, kernel: str, block_size: int, half: Callable[[str], Any]) -> None:
    """Blocks that left the window are given back, and nobody looks where they were. Gemma 2 has softcap too."""
    model, inputs = half(kind), prompts([50, 21])
    pool = PagePool.for_model(model, num_blocks=60, block_size=block_size, kernel=kernel)
    want = default(model, inputs, attn="eager", max_new_tokens=6)
    assert torch.equal(paged(model, inputs, pool, max_new_tokens=6), want)
    windows = {arguments["window_size"] for _, arguments in DOUBLES[kernel].calls[-3:]}
    assert (7, 0) in windows


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        **dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
        **dict(
            head_dim=16, num_local_experts=2, num_experts_per_tok=1, vocab_size=160, sliding_window=8, pad_token_id=0
        ),
    )
    model = GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=2.0 if name.endswith("sinks") else parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("paged")
    return model.half()


@pytest.mark.parametrize(
    ("kernel", "native"), [("double2", False), ("double3", False), ("double3s", True), ("double4", True)]
)
def test_layers_with_sinks_go_where_sinks_are(kernel: str, native: bool, gpt_oss: Any) -> None:
    """A backend without sinks is never called for a layer that has some; another kernel reads the same storage."""
    inputs = prompts([20, 7])
    pool = PagePool.for_model(gpt_oss, num_blocks=60, kernel=kernel)
    DOUBLES[kernel].calls.clear()
    out = paged(gpt_oss, inputs, pool, max_new_tokens=6)
    assert torch.equal(out, default(gpt_oss, inputs, attn="eager", max_new_tokens=6))
    assert bool(DOUBLES[kernel].calls) == native
    assert pool.kernel == kernel


def test_storage_begins_with_zeros_where_nan_would_leak(half: Callable[[str], Any]) -> None:
    """Fresh memory holds anything: what a pool allocates for versions 3 and 4 does not."""
    dirty = torch.full((2**20,), float("nan"))  # so that a plain allocation has a chance to see it
    del dirty
    pool = PagePool.for_model(half("llama"), num_blocks=60, kernel="double3")
    new = torch.empty(1, 2, 0, 16, dtype=torch.float16)
    assert all((tensor == 0).all() for tensor in pool.storage_for(0, new, new)[:2])


# ----------------------------------------------------------------------------------------------------------- finding


def test_versions_are_told_by_what_they_take() -> None:
    for double, version in ((FlashAttn2(), 2), (FlashAttn3(), 3), (FlashAttn3WithSinks(), 3), (FlashAttn4(), 4)):
        assert flash_find.version_of(flash_find.functions_of(double, "")) == version  # type: ignore[arg-type]
    assert flash_find.version_of(Functions(lambda q, k, v: None, None, "")) is None


def test_hub_kernels_count_once_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded: a build counts when this process has loaded it before, and a later look finds it."""
    backend, loaded = Flash3(capability=lambda device: (9, 0)), []
    cpu = torch.device("cpu")
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_loaded_kernels=lambda: loaded))  # type: ignore
    assert "FlashAttention 3 is not installed" in str(backend.problem(cpu, torch.float16, 64, 64, 16))
    for double, name in ((FlashAttn2(), "two"), (FlashAttn3WithSinks(), "three"), (object(), "other")):
        loaded.append(types.SimpleNamespace(module=double, metadata=types.SimpleNamespace(name=name)))
    assert backend.problem(cpu, torch.float16, 64, 64, 16) is None
    assert backend.describe() == "three from the Hub" and "sinks" in backend.features


def test_a_package_that_does_not_import_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_find, "flash_attention_installed", lambda version: version == 2)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(KernelUnavailable, match="flash-attn is installed but cannot be used"):
        flash_find.find(2)
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn2())  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.3")
    assert flash_find.find(2).source == "flash-attn 2.8.3"


def test_problems_name_what_would_serve() -> None:
    cpu, half = torch.device("cpu"), torch.float16
    two, three, four = (BACKENDS[name] for name in ("double2", "double3", "double4"))
    assert two.problem(cpu, half, 256, 256, 512) is None
    assert "multiples of 256, not 16: use 256" in str(two.problem(cpu, half, 64, 64, 16))
    assert "bfloat16 and float16, not torch.float32" in str(two.problem(cpu, torch.float32, 64, 64, 256))
    assert "head dims up to 256, not (264, 264)" in str(two.problem(cpu, half, 260, 64, 256))
    assert three.problem(cpu, half, 64, 64, 1) is None and four.problem(cpu, half, 192, 256, 48) is None
    turing = Flash2(two._find, lambda device: (7, 5))  # type: ignore[attr-defined]
    assert "compute capabilities 8.x, 9.x, 10.x, 11.x, 12.x, not 7.5" in str(turing.problem(cpu, half, 64, 64, 256))
    blackwell = Flash4(four._find, lambda device: (10, 0))  # type: ignore[attr-defined]
    assert blackwell.problem(cpu, half, 192, 128, 128) is None
    assert "up to 128, or 192 and 128" in str(blackwell.problem(cpu, half, 256, 256, 128))
    assert "only on CUDA devices" in str(BACKENDS["flash2"].problem(cpu, half, 64, 64, 256))
    old = Flash2(lambda: Functions(lambda q: q, lambda q, block_table: q, "flash-attn 2.5"), lambda device: (8, 0))
    assert "flash-attn 2.5 is too old for flash2: it does not know cache_seqlens" in str(
        old.problem(cpu, half, 8, 8, 256)
    )


@pytest.mark.parametrize(("version", "double"), [(2, FlashAttn2), (3, FlashAttn3), (4, FlashAttn4)])
def test_the_doubles_have_the_real_signatures(version: int, double: type) -> None:
    try:
        real = flash_find.find(version)
    except KernelUnavailable as error:
        pytest.skip(str(error))
    for name, function in (("flash_attn_varlen_func", real.varlen), ("flash_attn_with_kvcache", real.with_kvcache)):
        if function is None or (version == 3 and name == "flash_attn_varlen_func"):
            continue
        ours = list(inspect.signature(getattr(double(), name)).parameters)
        assert [argument for argument in inspect.signature(function).parameters if argument in ours] == ours
