"""The Triton kernels against dense attention and against the reference: on the GPU where there is one, else on the CPU in
Triton's interpreter, which `conftest.py` turns on. Memory that nobody wrote to holds NaN, columns of a block table that
must not be read hold ids far outside the pool."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kernels import Case, make
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.kernels import KERNELS, WRITERS, reference
from hf_paged.kernels import triton as backend

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
GARBAGE = 2**30  # an id in a column that must not be read
RANDOM_CASES, PER_TEST = 320, 40

pytestmark = pytest.mark.skipif(backend.available() is not None, reason=str(backend.available()))


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Outputs and intermediate results start as NaN: `torch.empty` fills under this flag."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as uint16, and would multiply these."""
    if GPU:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *args: Any) -> Any:
        if a.dtype == tl.bfloat16:
            a, b = (interpreter.TensorHandle(float32_of(x.data), tl.float32) for x in (a, b))
        return multiply(self, a, b, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)


def float32_of(bfloat16: Any) -> Any:
    return (bfloat16.astype("uint32") << 16).view("float32")


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut every row into so many parts."""

    def cut(parts: int) -> None:
        monkeypatch.setattr(backend, "choose_parts", lambda programs, keys, processors: parts)

    return cut


def hide(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fill with garbage what no query sees: table columns, and slots to the left of the windows."""
    k_pool, v_pool, table, window = (arguments[name] for name in ("k_pool", "v_pool", "block_table", "window"))
    size = k_pool.shape[1]
    spare = next(frame for frame in range(len(k_pool)) if frame not in table)
    for pool in (k_pool, v_pool):  # frame 0 is what a masked load of the table gives: it holds nothing
        pool[[0, spare]] = pool[[spare, 0]]
    table[table == 0] = spare
    counts = arguments["cu_seqlens_q"].diff()
    for row, (length, count) in enumerate(zip(arguments["seq_lens"].tolist(), counts.tolist())):
        begin = max(0, length - count - window + 1) if window else 0
        if not count:
            begin = length
        for token in range(begin):
            for pool in (k_pool, v_pool):
                pool[table[row, token // size], token % size] = float("nan")
        table[row, -(-length // size) :] = GARBAGE
        table[row, : begin // size] = -GARBAGE
        if not count:
            table[row] = GARBAGE
    return arguments


def own(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a kernel's own function takes: not the bounds, which are for the operator."""
    return {name: value for name, value in arguments.items() if not name.startswith("max_seqlen")}


def attend(arguments: dict[str, Any]) -> Tensor:
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments.values()]
    return KERNELS["triton"](*moved).cpu()


def check(case: Case, seed: int = 0) -> float:
    """Returns the largest error in float32; in other types the largest one relative to sdpa's in that type."""
    arguments, exact, low = make(case, seed)
    out = attend(hide(arguments))
    assert out.dtype == case.dtype and out.shape == exact.shape
    error = float((out.float() - exact).abs().max())
    assert error == error, "NaN"
    if case.dtype == torch.float32:
        assert error < 1e-5
        return error
    rounding = torch.finfo(case.dtype).eps / 2 * exact.abs().max()  # of the result; with few numbers sdpa may be lucky
    allowed = float(torch.maximum((low.float() - exact).abs().max(), rounding))
    assert error <= 2 * allowed
    return error / allowed


CASES = {
    "decode": Case([1, 16, 17, 90], [1, 1, 1, 1], block_size=16),
    "decode 128": Case([100, 61], [1, 1], block_size=32, dims=(128, 128), heads=(8, 2)),
    "prefill over tiles": Case([75, 20], [75, 20], block_size=16, heads=(2, 1)),
    "past": Case([150, 33, 40], [70, 1, 3], block_size=64, heads=(2, 1)),
    "rows without queries or tokens": Case([0, 20, 6, 0, 9], [0, 2, 0, 0, 1], block_size=16),
    "group of 1": Case([7, 33], [2, 1], heads=(3, 3), block_size=16),
    "group of 3": Case([45, 33], [40, 1], heads=(3, 1), block_size=16),
    "group of 71": Case([40], [2], heads=(71, 1), dims=(64, 64), block_size=16),
    "dims 80": Case([37], [37], dims=(80, 80), block_size=16),
    "dims 24 and 72": Case([37, 5], [3, 1], dims=(24, 72), block_size=16),
    "dims 192 and 128": Case([37, 5], [3, 1], dims=(192, 128), block_size=16),
    "dims 256": Case([70], [20], dims=(256, 256), block_size=16),
    "dims 8": Case([70], [20], dims=(8, 8), block_size=16),
    "block 128": Case([130, 127], [1, 5], block_size=128),
    "block 256": Case([257, 255], [1, 5], block_size=256),
    "window": Case([60, 30, 3], [5, 12, 1], window=17, block_size=16),
    "window of 1": Case([9, 30], [9, 2], window=1, block_size=16),
    "window over tiles": Case([120], [70], window=20, block_size=16, heads=(1, 1)),
    "softcap": Case([9, 80], [9, 1], softcap=2.0, block_size=16),
    "sinks": Case([9, 80], [9, 1], sinks=True, block_size=16),
    "all at once": Case([9, 120, 1], [9, 4, 1], (6, 2), (32, 16), 16, 50, 3.0, True),
    "bfloat16": Case([9, 100], [9, 1], dtype=torch.bfloat16, dims=(64, 64), block_size=16),
    "float16": Case([9, 100], [9, 1], dtype=torch.float16, dims=(64, 64), block_size=16),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_against_dense(name: str, parts: int, in_parts: Callable[[int], None]) -> None:
    in_parts(parts)
    check(CASES[name])


@pytest.mark.parametrize("sinks", [False, True])
def test_more_parts_than_are_joined_at_once(sinks: bool, in_parts: Callable[[int], None]) -> None:
    """And the highest scores are in the parts that are joined last."""
    in_parts(backend.PARTS_PER_STEP + 3)
    arguments, _, _ = make(Case([600, 3], [1, 1], block_size=16, sinks=sinks))
    arguments["k_pool"][arguments["block_table"][0, 36:38].long()] *= 5
    assert torch.allclose(attend(arguments), reference.attention(**own(arguments)), atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_query_without_keys_gives_zero(parts: int, sinks: bool, in_parts: Callable[[int], None]) -> None:
    """More queries than tokens: the first ones see nothing. And a row without tokens at all."""
    in_parts(parts)
    arguments, _, _ = make(Case([3, 0], [3, 0], sinks=sinks, block_size=16))
    arguments["q"] = torch.randn(25, 4, 16, generator=torch.Generator().manual_seed(1))
    arguments["cu_seqlens_q"] = torch.tensor([0, 20, 25], dtype=torch.int32)
    out = attend(hide(arguments))
    assert (out[:17] == 0).all() and (out[20:] == 0).all() and (out[17:20] != 0).any(-1).all()
    assert torch.allclose(out, reference.attention(**own(arguments)), atol=1e-5)


def test_empty_batches() -> None:
    arguments, _, _ = make(Case([3], [3]))
    none = dict(arguments, q=arguments["q"][:0], cu_seqlens_q=torch.zeros(2, dtype=torch.int32))
    assert attend(none).shape == (0, 4, 16)
    table = torch.empty(1, 0, dtype=torch.int32)
    assert (attend(dict(arguments, block_table=table, seq_lens=torch.zeros(1, dtype=torch.int32))) == 0).all()


def test_many_rows() -> None:
    """More rows than the search for the row of a tile looks at in one go."""
    check(Case([3] * 126 + [5, 40, 2], [0] * 60 + [1] + [0] * 66 + [35, 1], heads=(1, 1), block_size=16))


def test_strided_queries_and_tables() -> None:
    """Queries as a slice of a fused projection, a table as a slice of a wider one, a pool with room between frames."""
    case = Case([9, 30], [9, 1], block_size=16)
    arguments, exact, _ = make(case)
    q = torch.full((10, 3, 4, 16), float("nan"))
    q[:, 1] = arguments["q"]
    pool = torch.full((len(arguments["k_pool"]), 20, 2, 16), float("nan"))
    pool[:, :16] = arguments["k_pool"]
    table = torch.full((2, 9), GARBAGE, dtype=torch.int32)
    table[:, : arguments["block_table"].shape[1]] = arguments["block_table"]
    strided = dict(arguments, q=q[:, 1], k_pool=pool[:, :16], block_table=table[:, :4])
    assert (attend(strided) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("parts", [1, 2])
def test_products_and_sums_are_fused(
    parts: int, in_parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Triton 3.10 on they are only where a launch asks for it."""
    launches: list[Any] = []

    class Launch:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: launches.append(options)

    monkeypatch.setattr(backend, "_ops", lambda: types.SimpleNamespace(attend=Launch(), reduce_splits=Launch()))
    in_parts(parts)
    attend(make(Case([9], [1]))[0])
    assert [options["enable_fp_fusion"] for options in launches] == [True] * parts


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, RANDOM_CASES, PER_TEST))
def test_random_shapes(first: int, in_parts: Callable[[int], None]) -> None:
    worst: dict[torch.dtype, float] = {}
    for seed in range(first, first + PER_TEST):
        case, parts = draw(seed)
        in_parts(parts)
        try:
            worst[case.dtype] = max(worst.get(case.dtype, 0.0), check(case, seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case} in {parts} parts") from error
    print(f"seeds {first} to {first + PER_TEST - 1}: {worst}")


def draw(seed: int) -> tuple[Case, int]:
    rng = random.Random(seed)
    size = rng.choice(backend.BLOCK_SIZES)
    kind = rng.choice(["decode", "decode", "few", "prefill", "mixed"])
    lengths, queries = [], []
    for _ in range(rng.choice([1, 2, 3, 5])):
        edge = size * rng.randint(1, 2) + rng.choice([-1, 0, 1])
        length = rng.choice([1, 2, edge, rng.randint(1, 70), rng.randint(60, 300)])
        this = rng.choice(["decode", "few", "prefill", "empty", "none"]) if kind == "mixed" else kind
        past = rng.choice([0, length // 2])
        few, many = min(length, rng.randint(2, 5)), min(length - past, rng.randint(20, 80))
        queries.append({"decode": 1, "few": few, "prefill": many, "empty": 0, "none": 0}[this])
        lengths.append(0 if this == "empty" else length)
    if not sum(queries):
        lengths[0], queries[0] = 5, 1
    kv_heads = rng.choice([1, 2, 3])
    dims = [8, 16, 24, 32, 64, 72, 80, 96, 128, 160, 192, 256]
    case = Case(
        lengths,
        queries,
        heads=(kv_heads * rng.choice([1, 2, 3, 4, 5, 8]), kv_heads),
        dims=(rng.choice(dims), rng.choice(dims)),
        block_size=size,
        window=rng.choice([0, 0, 1, 5, 16, 33, 500]),
        softcap=rng.choice([0.0, 0.0, 0.0, 5.0, 30.0]),
        sinks=rng.random() < 0.25,
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
    )
    return case, rng.choice([1, 1, 2, 3, 7, 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_pads", [False, True])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(3, 8, 6), (20, 256, 128)])
def test_write(with_pads: bool, dtype: torch.dtype, heads: int, key_dim: int, value_dim: int) -> None:
    """Only the named tokens are written, to the named slots, from keys as models deliver them."""
    k_pool = torch.full((5, 16, heads, key_dim), float("nan"), dtype=dtype)
    v_pool = torch.full((5, 16, heads, value_dim), float("nan"), dtype=dtype)
    key = torch.randn(2, 3, heads, key_dim).to(dtype).transpose(1, 2)  # [B, H_kv, n, D_k], token by token
    value = torch.randn(2, heads, 3, value_dim).to(dtype)
    source = torch.tensor([1, 2, 5]) if with_pads else None
    slots = torch.tensor([79, 0, 18] if with_pads else [79, 0, 18, 17, 2, 40])
    pools = k_pool.clone().to(DEVICE), v_pool.clone().to(DEVICE)
    WRITERS["triton"](*pools, *(None if x is None else x.to(DEVICE) for x in (key, value, slots, source)))
    reference.write(k_pool, v_pool, key, value, slots, source)
    for written, expected in zip(pools, (k_pool, v_pool)):
        assert torch.equal(written.cpu().nan_to_num(123.0), expected.nan_to_num(123.0))
        assert expected.isfinite().any(-1).any(-1).sum() == len(slots)


def test_operators_have_fakes_and_declared_mutations() -> None:
    arguments, _, _ = make(Case([9, 12], [3, 1]))
    moved = tuple(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments.values())
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(KERNELS["triton"], moved, test_utils=utils)
    pools = (torch.zeros(3, 16, 2, 8, device=DEVICE), torch.zeros(3, 16, 2, 8, device=DEVICE))
    new = (torch.randn(1, 2, 3, 8, device=DEVICE), torch.randn(1, 2, 3, 8, device=DEVICE))
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    torch.library.opcheck(WRITERS["triton"], (*pools, *new, slots, None), test_utils=utils)


class Launches:
    """Stands for the module of Triton programs, and notes which were started."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Launches:
        self.names.append(name)
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_the_host_never_waits(in_parts: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the arguments and the launch nothing is read from the device, or copied."""
    in_parts(2)
    launches = Launches()
    monkeypatch.setattr(backend, "_ops", lambda: launches)
    arguments, _, _ = make(Case([9, 30], [9, 1], sinks=True, window=7, softcap=2.0, block_size=16))
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in own(arguments).values()]
    key = torch.randn(1, 2, 3, 16, device=DEVICE)
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    with Operators() as seen:
        backend.attention(*moved)
        backend.write(moved[1], moved[2], key, key, slots, None)
    assert seen.names <= {"aten.new_empty.default", "aten.fill_.Scalar"}  # new memory, and NaN in it for these tests
    assert launches.names == ["attend", "reduce_splits", "write_tokens"]


def test_parts() -> None:
    """Few programs are multiplied until the device is full, but not beyond what the keys are worth."""
    choose, most = backend.choose_parts, backend.PROGRAMS_PER_PROCESSOR
    assert choose(programs=8, keys=1 << 20, processors=132) == 64
    assert choose(programs=32, keys=1 << 20, processors=132) == most * 132 // 32
    assert choose(programs=8, keys=1000, processors=132) == 8
    assert choose(programs=10**6, keys=1 << 20, processors=132) == 1
    assert choose(programs=1, keys=0, processors=132) == 1


def test_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, cpu, half = backend.problem, torch.device("cpu"), torch.float16
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problem(cpu, half, 256, 8, 16) is None
    assert problem(torch.device("meta"), half, 64, 64, 16) == "the triton kernel runs on CUDA devices, not on meta"
    assert "not torch.float64" in (problem(cpu, torch.float64, 64, 64, 16) or "")
    assert "head dims up to 256, not (320, 64)" in (problem(cpu, half, 320, 64, 16) or "")
    assert "head dims up to 256, not (64, 320)" in (problem(cpu, half, 64, 320, 16) or "")
    for size in (8, 48, 512):
        assert f"not of {size}" in (problem(cpu, half, 64, 64, size) or "")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert problem(cpu, half, 64, 64, 16) == "the triton kernel runs on CUDA devices, not on cpu"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in (problem(cpu, half, 64, 64, 16) or "")


def test_misfits_are_refused() -> None:
    arguments, _, _ = make(Case([9, 30], [9, 1]))
    for name, wrong in (
        ("q", arguments["q"].half()),
        ("q", arguments["q"].mT.contiguous().mT),
        ("q", arguments["q"][:, :3]),
        ("v_pool", arguments["v_pool"][:, :2]),
        ("block_table", arguments["block_table"].long()),
        ("seq_lens", arguments["seq_lens"][:1]),
        ("cu_seqlens_q", arguments["cu_seqlens_q"][1:]),
        ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, device="meta")),
    ):
        with pytest.raises(ValueError, match="attention: these do not fit together"):
            backend.attention(**dict(own(arguments), **{name: wrong}))
    key, slots = torch.randn(1, 2, 3, 16), torch.tensor([0, 1, 2])
    for wrong_key, wrong_slots in ((key.half(), slots), (key[:, :1], slots), (key, slots[:2]), (key, slots.int())):
        with pytest.raises(ValueError, match="do not fit into pools"):
            backend.write(arguments["k_pool"], arguments["v_pool"], wrong_key, key, wrong_slots, None)
    with pytest.raises(ValueError, match="do not fit into pools"):
        backend.write(arguments["k_pool"], arguments["v_pool"], key, key, slots, slots.to("meta"))


def resources(*options: str) -> list[dict[str, Any]]:
    """What `triton_resources.py` prints. It compiles, which a process cannot do once it interprets."""
    tools = Path(str(importlib.util.find_spec("triton").origin)).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip("triton has no ptxas here")
    script = Path(__file__).with_name("triton_resources.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = subprocess.run(
        [sys.executable, script, *options], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_compiles_without_a_gpu_and_multiplies_frame_ids_in_int64() -> None:
    """A pool may have more than 2**31 elements."""
    (program,) = resources("--quick")
    assert program["products"] == ["i64"] and program["stack"] == 0


@pytest.mark.slow
def test_resources() -> None:
    """Every tile of the table fits into the smallest shared memory of the devices served, and next to nothing spills."""
    programs = resources()
    assert len(programs) >= 150
    for program in programs:
        assert program["products"] == ["i64"], program
        assert program["shared"] <= 99 * 1024, program
        assert program["stack"] <= 24, program


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("queries", [1, 20])
def test_pool_beyond_int32(queries: int) -> None:
    """Frames whose first element has an index above 2**31."""
    arguments, _, _ = make(Case([90], [queries], heads=(16, 8), dims=(128, 128), block_size=256, dtype=torch.float16))
    expected = attend(arguments)
    num_frames = 2**31 // (256 * 8 * 128) + 8
    for name in ("k_pool", "v_pool"):
        small = arguments[name]
        arguments[name] = torch.empty(num_frames, *small.shape[1:], dtype=small.dtype, device=DEVICE)
        arguments[name][-len(small) :] = small.to(DEVICE)
    arguments["block_table"][:, :1] += num_frames - len(small)
    assert torch.equal(attend(arguments), expected)
    slots = torch.tensor([(num_frames - 1) * 256 + 7], device=DEVICE)
    key = torch.randn(1, 8, 1, 128, dtype=torch.float16, device=DEVICE)
    WRITERS["triton"](arguments["k_pool"], arguments["v_pool"], key, key, slots, None)
    assert torch.equal(arguments["v_pool"][-1, 7], key[0, :, 0])
