"""The compiled CPU kernel against an obvious reference, over shapes drawn at random.

Every slot that must not be read holds NaN, and every column of a block table that must not be read holds an id far
outside the pool, so that a stray read shows as NaN or as a crash. ``HF_PAGED_TEST_CASES=500`` draws more cases.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from hf_paged.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")

CASES = int(os.environ.get("HF_PAGED_TEST_CASES", "60"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GARBAGE = 2**30  # an id in a column that must not be read


@dataclass
class Problem:
    """Arguments of one call. Lengths and query counts are per row."""

    q: torch.Tensor  # [T, Hq, D_k]
    k_pool: torch.Tensor  # [num_blocks, block_size, H_kv, D_k]
    v_pool: torch.Tensor  # [num_blocks, block_size, H_kv, D_v]
    table: torch.Tensor  # [B, M]
    lengths: list[int]
    counts: list[int]
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    keys: list[torch.Tensor] = field(default_factory=list)  # per row [L, H_kv, D_k]
    values: list[torch.Tensor] = field(default_factory=list)

    def run(self, **options: object) -> torch.Tensor:
        options.setdefault("num_threads", 1)
        starts = torch.tensor([0, *self.counts]).cumsum(0).to(torch.int32)
        return cpu.attention(
            self.q,
            self.k_pool,
            self.v_pool,
            self.table,
            torch.tensor(self.lengths, dtype=torch.int32),
            starts,
            self.scale,
            self.window,
            self.softcap,
            self.sinks,
            **options,
        )

    def reference(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """One query, one head at a time. float64, so that only the kernel's own rounding shows."""
        _, q_heads, _ = self.q.shape
        group = q_heads // self.k_pool.shape[2]
        out = torch.zeros(self.q.shape[0], q_heads, self.v_pool.shape[3], dtype=dtype)
        token = 0
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            for j in range(count):
                last = length - count + j
                first = max(0, last - self.window + 1) if self.window > 0 else 0
                if last >= 0:
                    for head in range(q_heads):
                        key = self.keys[row][first : last + 1, head // group].to(dtype)
                        value = self.values[row][first : last + 1, head // group].to(dtype)
                        score = key @ self.q[token, head].to(dtype) * self.scale
                        if self.softcap:
                            score = self.softcap * torch.tanh(score / self.softcap)
                        if self.sinks is not None:
                            score = torch.cat([score, self.sinks[head : head + 1].to(dtype)])
                        weight = score.softmax(0)[: len(value)]
                        out[token, head] = weight @ value
                token += 1
        return out


def make(
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    lengths: list[int],
    counts: list[int],
    kv_heads: int = 2,
    group: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    shared: list[tuple[int, int]] | None = None,
    spread: float = 1.0,
) -> Problem:
    """Rows scattered over a pool at random. ``shared[row] = (parent, blocks)``: leading blocks of an earlier row."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.full((rows, max([*needed, 1]) + 2), GARBAGE, dtype=torch.int32)
    keys = [normal(length, kv_heads, key_dim) for length in lengths]
    values = [normal(length, kv_heads, value_dim) for length in lengths]
    k_pool = torch.full((num_blocks, block_size, kv_heads, key_dim), math.nan, dtype=dtype)
    v_pool = torch.full((num_blocks, block_size, kv_heads, value_dim), math.nan, dtype=dtype)
    for row in range(rows):
        parent, blocks = shared[row] if shared else (row, 0)
        oldest = max(0, lengths[row] - counts[row] - window + 1) if window > 0 and counts[row] else 0
        for column in range(needed[row]):
            begin, end = column * block_size, min((column + 1) * block_size, lengths[row])
            if column < blocks:
                table[row, column] = table[parent, column]
                keys[row][begin:end] = keys[parent][begin:end]
                values[row][begin:end] = values[parent][begin:end]
                continue
            block = order.pop()
            if end <= oldest:
                continue  # outside the window: the column stays garbage
            begin = max(begin, oldest)
            table[row, column] = block
            k_pool[block, begin - column * block_size : end - column * block_size] = keys[row][begin:end]
            v_pool[block, begin - column * block_size : end - column * block_size] = values[row][begin:end]
    q = normal(sum(counts), kv_heads * group, key_dim) * spread
    return Problem(
        q,
        k_pool,
        v_pool,
        table,
        lengths,
        counts,
        scale=key_dim**-0.5,
        window=window,
        softcap=softcap,
        sinks=torch.randn(kv_heads * group, generator=generator) * 2 if sinks else None,
        keys=keys,
        values=values,
    )


def tolerance(dtype: torch.dtype) -> float:
    """Error of one rounded output of size about 1 to 4, plus float32 sums (scores up to about 50)."""
    return {torch.float32: 2e-5, torch.bfloat16: 1.7e-2, torch.float16: 2.1e-3}[dtype]


def check(problem: Problem, **options: object) -> None:
    actual, expected = problem.run(**options), problem.reference()
    assert actual.dtype == problem.q.dtype and actual.shape == expected.shape
    allowed = tolerance(actual.dtype) / 2
    torch.testing.assert_close(actual.double(), expected, rtol=allowed, atol=allowed)


def draw(seed: int) -> Problem:
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 7, 16, 16, 32, 256])
    rows = rng.choice([1, 1, 2, 3, 5])
    kind = rng.choice(["decode", "decode", "few", "chunk", "prefill", "mixed"])
    lengths, counts = [], []
    for _ in range(rows):
        edge = block_size * rng.randint(1, 4) + rng.choice([-1, 0, 1])
        length = max(0, rng.choice([0, 1, 2, edge, rng.randint(1, 70), rng.randint(60, 300)]))
        this = rng.choice(["decode", "few", "chunk", "prefill", "none"]) if kind == "mixed" else kind
        few, chunk = rng.randint(1, 5), rng.randint(1, max(length, 1))
        counts.append({"decode": 1, "few": few, "chunk": chunk, "prefill": length, "none": 0}[this])
        lengths.append(length)
    shared = None
    if rows > 1 and rng.random() < 0.5:
        shared = [(0, 0)]
        for row in range(1, rows):
            parent = rng.randrange(row)
            # A shared block is full in both rows, and no query of either stands before its end.
            whole = min((lengths[r] - counts[r]) // block_size for r in (row, parent))
            shared.append((parent, rng.randint(0, max(whole, 0))))
    return make(
        seed,
        dtype=rng.choice(DTYPES),
        lengths=lengths,
        counts=counts,
        kv_heads=rng.choice([1, 1, 2, 3]),
        group=rng.choice([1, 2, 3, 4, 5, 8]),
        key_dim=rng.choice([8, 16, 24, 32, 64, 64, 72, 80, 96, 128, 136, 192, 256]),
        value_dim=rng.choice([8, 16, 24, 40, 64, 64, 104, 128, 256]),
        block_size=block_size,
        window=0 if shared else rng.choice([0, 0, 1, 5, 16, 33, 500]),
        softcap=rng.choice([0.0, 0.0, 0.0, 5.0, 30.0]),
        sinks=rng.random() < 0.25,
        shared=shared,
        spread=rng.choice([1.0, 1.0, 4.0]),
    )


@pytest.mark.parametrize("seed", range(CASES))
def test_against_reference(seed: int) -> None:
    rng = random.Random(seed)
    check(draw(seed), share_prefix=rng.random() < 0.8, split=rng.choice([None, None, True, False]))


@pytest.mark.parametrize("seed", range(0, CASES, 6))
def test_two_threads(seed: int) -> None:
    check(draw(seed), num_threads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 24, 64, 72, 128, 256])
def test_head_sizes(dtype: torch.dtype, dim: int) -> None:
    check(make(1, dtype=dtype, lengths=[37, 130], counts=[1, 1], key_dim=dim, value_dim=dim, group=1))
    check(make(2, dtype=dtype, lengths=[130], counts=[130], key_dim=dim, value_dim=dim, group=3))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 71, 128])
def test_group_sizes(group: int) -> None:
    check(make(3, lengths=[40, 3], counts=[1, 3], kv_heads=1, group=group, key_dim=32, value_dim=32))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("count", [1, 3, 90])
def test_window_reads_nothing_outside(window: int, count: int) -> None:
    check(make(4, lengths=[200, 97], counts=[count, min(count, 97)], window=window))
    check(make(4, lengths=[200, 97], counts=[count, min(count, 97)], window=window), split=True)


def test_rows_without_tokens_or_queries() -> None:
    problem = make(5, lengths=[0, 20, 0, 9, 40], counts=[0, 1, 1, 0, 2])
    check(problem)
    assert (problem.run()[1] == 0).all()


def test_queries_before_the_first_token_give_zeros() -> None:
    problem = make(6, lengths=[3], counts=[5], sinks=True)
    actual = problem.run()
    assert (actual[:2] == 0).all() and (actual[2:] != 0).any()
    check(problem)


def test_nothing_to_do() -> None:
    assert make(7, lengths=[], counts=[]).run().shape == (0, 4, 64)


def test_shared_prefix_with_window_and_freed_columns() -> None:
    # The rows share blocks 6..8; what the window left behind is garbage of the same value in both tables.
    problem = make(8, lengths=[190, 190], counts=[1, 1], window=100, shared=[(0, 0), (0, 9)])
    assert problem.table[1, 4] == GARBAGE
    check(problem)


TREE = [(0, 0), (0, 9), (0, 5), (0, 20), (3, 31), (0, 0), (2, 8), (0, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["as is", "shuffled"])
@pytest.mark.parametrize("counts", [1, 3])
def test_shared_prefix_tree(dtype: torch.dtype, order: str, counts: int) -> None:
    problem = make(9, dtype=dtype, lengths=[500, 480, 333, 510, 499, 100, 321, 60], counts=[counts] * 8, shared=TREE)
    if order == "shuffled":
        shuffle = [5, 0, 6, 3, 7, 1, 4, 2]
        problem.table = problem.table[shuffle]
        problem.lengths = [problem.lengths[i] for i in shuffle]
        problem.keys = [problem.keys[i] for i in shuffle]
        problem.values = [problem.values[i] for i in shuffle]
    check(problem, share_prefix=True)
    check(problem, share_prefix=True, split=True)
    on, off = problem.run(share_prefix=True), problem.run(share_prefix=False)
    torch.testing.assert_close(on.float(), off.float(), rtol=tolerance(dtype), atol=tolerance(dtype))


def test_rows_with_equal_tables_and_other_lengths() -> None:
    # A row may share a block that another row goes on filling; only its own length counts.
    problem = make(10, lengths=[100, 100, 100], counts=[1, 1, 1], shared=[(0, 0), (0, 7), (0, 7)])
    problem.lengths = [100, 98, 70]
    problem.keys = [key[:length] for key, length in zip(problem.keys, problem.lengths, strict=True)]
    problem.values = [value[:length] for value, length in zip(problem.values, problem.lengths, strict=True)]
    check(problem)


def test_split_on_and_off_agree() -> None:
    for seed in range(20):
        problem = draw(1000 + seed)
        on, off = problem.run(split=True), problem.run(split=False)
        torch.testing.assert_close(on.float(), off.float(), rtol=1e-2, atol=tolerance(on.dtype))


def test_strided_views() -> None:
    problem = make(11, lengths=[50, 20], counts=[4, 4])
    expected = problem.reference()
    batch = torch.stack(problem.q.split(4)).transpose(1, 2).contiguous()  # [B, Hq, n, D]
    problem.q = batch.transpose(1, 2).reshape(8, 4, 64)
    check(problem)
    wide = torch.zeros(8, 6, 80)
    wide[:, 1:5, 8:72] = problem.q
    problem.q = wide[:, 1:5, 8:72]
    out = torch.full((4, 8, 64), math.nan).transpose(0, 1)  # [T, Hq, D] over [Hq, T, D]
    assert problem.run(out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    # Pools inside a larger storage, and a table that is a slice of a wider one.
    for name in ("k_pool", "v_pool"):
        pool = getattr(problem, name)
        big = torch.full((pool.shape[0], 2, pool.shape[1], pool.shape[2] + 1, pool.shape[3] + 8), math.nan)
        big[:, 1, :, 1:, 8:] = pool
        setattr(problem, name, big[:, 1, :, 1:, 8:])
    table = torch.full((2, 40), GARBAGE, dtype=torch.int32)
    table[:, : problem.table.shape[1]] = problem.table
    problem.table = table[:, : problem.table.shape[1]]
    check(problem)


def test_extreme_scores() -> None:
    # Scores of several hundred: the running maximum must keep every exponential in range.
    problem = make(12, lengths=[300, 300], counts=[1, 20], spread=150.0)
    torch.testing.assert_close(problem.run(split=True).double(), problem.reference(), rtol=1e-3, atol=1e-3)
    problem = make(12, lengths=[300], counts=[1], sinks=True)
    problem.sinks = torch.tensor([200.0, -200.0, 0.0, 90.0])
    check(problem)


def test_pool_beyond_two_to_the_31_elements() -> None:
    # Untouched pages of the pool cost nothing; only the last frames are written.
    block_size, heads, dim = 16, 2, 64
    num_blocks = (2**31) // (block_size * heads * dim) + 8
    try:
        k_pool = torch.empty(num_blocks, block_size, heads, dim, dtype=torch.bfloat16)
        v_pool = torch.empty(num_blocks, block_size, heads, dim, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for a large pool")
    assert k_pool.numel() > 2**31
    problem = make(13, dtype=torch.bfloat16, lengths=[30, 17], counts=[1, 2])
    columns = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for new, (row, column) in zip(range(num_blocks - 4, num_blocks), columns, strict=True):
        k_pool[new] = problem.k_pool[problem.table[row, column]]
        v_pool[new] = problem.v_pool[problem.table[row, column]]
        problem.table[row, column] = new
    problem.k_pool, problem.v_pool = k_pool, v_pool
    check(problem)
    slot = torch.tensor([num_blocks * block_size - 1])
    key, value = torch.ones(1, heads, dim, dtype=torch.bfloat16), torch.full((1, heads, dim), 2.0, dtype=torch.bfloat16)
    cpu.write(k_pool, v_pool, key, value, slot)
    assert (k_pool[-1, -1] == 1).all() and (v_pool[-1, -1] == 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 200])
def test_as_accurate_as_sdpa(dtype: torch.dtype, count: int) -> None:
    problem = make(14, dtype=dtype, lengths=[700], counts=[count], kv_heads=2, group=4)
    exact = problem.reference()
    mask = torch.ones(count, 700, dtype=torch.bool).tril(700 - count)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        problem.q.transpose(0, 1)[None],
        problem.keys[0].transpose(0, 1)[None],
        problem.values[0].transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )[0].transpose(0, 1)

    def rms(x: torch.Tensor) -> float:
        return float((x.double() - exact).square().mean().sqrt())

    assert rms(problem.run()) <= 2 * rms(sdpa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["batch", "flat", "packed heads"])
def test_write(dtype: torch.dtype, layout: str) -> None:
    generator = torch.Generator().manual_seed(15)
    rows, heads, n, key_dim, value_dim, block_size = 3, 2, 5, 24, 40, 4
    key = torch.randn(rows, heads, n, key_dim, generator=generator).to(dtype)
    value = torch.randn(rows, heads, n, value_dim, generator=generator).to(dtype)
    k_pool = torch.full((9, block_size, heads, key_dim), -7.0, dtype=dtype)
    v_pool = torch.full((9, block_size, heads, value_dim), -7.0, dtype=dtype)
    source = torch.tensor([14, 0, 3, 9, 5, 6])
    slots = torch.tensor([35, 0, 13, -1, 7, 8])
    k_expected, v_expected = k_pool.clone(), v_pool.clone()
    for slot, token in zip(slots.tolist(), source.tolist(), strict=True):
        if slot >= 0:
            k_expected[slot // block_size, slot % block_size] = key[token // n, :, token % n]
            v_expected[slot // block_size, slot % block_size] = value[token // n, :, token % n]
    if layout == "flat":
        key = key.transpose(1, 2).reshape(rows * n, heads, key_dim)
        value = value.transpose(1, 2).reshape(rows * n, heads, value_dim)
        key, value, source = key[source], value[source], None
    elif layout == "packed heads":  # as a projection leaves them: [B, n, H, D], seen as [B, H, n, D]
        key = key.transpose(1, 2).contiguous().transpose(1, 2)
        value = value.transpose(1, 2).contiguous().transpose(1, 2)
    cpu.write(k_pool, v_pool, key, value, slots, source)
    assert torch.equal(k_pool, k_expected) and torch.equal(v_pool, v_expected)


def test_write_threads() -> None:
    key = torch.randn(2000, 4, 64)
    k_pool, v_pool = torch.zeros(130, 16, 4, 64), torch.zeros(130, 16, 4, 64)
    slots = torch.randperm(130 * 16)[:2000]
    cpu.write(k_pool, v_pool, key, -key, slots, num_threads=2)
    assert torch.equal(k_pool.view(-1, 4, 64)[slots], key) and torch.equal(v_pool.view(-1, 4, 64)[slots], -key)


def test_refuses_what_it_cannot_do() -> None:
    problem = make(16, lengths=[20], counts=[1])
    q = problem.q
    for bad in (q.double(), q[:, :3], torch.zeros(1, 4, 128)[..., ::2], torch.zeros(1, 4, 72)):
        problem.q = bad
        with pytest.raises(ValueError, match="q \\["):
            problem.run()
    problem.q = q
    problem.table = problem.table.long()
    with pytest.raises(ValueError, match=r"block_table .* int64"):
        problem.run()
    assert cpu.supports(torch.bfloat16, 64, 256)
    assert not cpu.supports(torch.float64, 64, 64)
    assert not cpu.supports(torch.float32, 60, 64)
    assert not cpu.supports(torch.float32, 64, 264)
    with pytest.raises(ValueError, match="write: keys"):
        new = torch.zeros(1, 2, 64)
        cpu.write(problem.k_pool.half(), problem.v_pool, new, new, torch.zeros(1).long())


def test_huge_pages_are_only_advice() -> None:
    """Contents stay, and memory too small for it is left alone."""
    tensor = torch.arange(2**20)
    cpu.advise_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(2**20))
    assert not cpu.advise_huge_pages(torch.zeros(0))


def test_read_sees_every_byte_of_whole_pages() -> None:
    tensor = torch.randint(-(2**62), 2**62, (4 * 512,))
    digest = cpu.read(tensor)
    assert digest == int(np.bitwise_xor.reduce(tensor.numpy())) % 2**64
    tensor[-1] += 1
    assert cpu.read(tensor) != digest
