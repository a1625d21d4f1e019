"""Every kernel against attention by torch's sdpa on dense tensors, with permuted tables, spare frames and NaN in every
slot that must not be read."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hf_paged.kernels import KERNELS, WRITERS

HERE = ["reference", "cpu"]  # the others have tests of their own


class Case(NamedTuple):
    lengths: list[int]  # tokens stored per row
    queries: list[int]  # of which the last ones ask
    heads: tuple[int, int] = (4, 2)  # query and key/value heads
    dims: tuple[int, int] = (16, 16)  # of keys and values
    block_size: int = 4
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "decode": Case([1, 4, 5, 37], [1, 1, 1, 1]),
    "prefill": Case([9, 4, 30], [9, 4, 30]),
    "mixed": Case([9, 12, 30, 5], [3, 1, 30, 0]),
    "empty rows": Case([0, 6, 0], [0, 2, 0]),
    "multi-head": Case([7, 33], [2, 1], heads=(6, 6)),
    "multi-query": Case([7, 33], [7, 1], heads=(8, 1)),
    "key and value dims": Case([7, 33], [7, 1], dims=(24, 8)),
    "block of 1": Case([7, 33], [7, 1], block_size=1),
    "block of 16": Case([16, 33], [7, 1], block_size=16),
    "window": Case([9, 30, 3], [9, 2, 1], window=5),
    "window of 1": Case([9, 30], [9, 2], window=1),
    "softcap": Case([9, 30], [9, 1], softcap=2.0),
    "sinks": Case([9, 30], [9, 1], sinks=True),
    "all at once": Case([9, 30, 1], [9, 4, 1], window=6, softcap=3.0, sinks=True, dims=(32, 16), heads=(6, 2)),
    "bfloat16": Case([9, 100], [9, 1], dtype=torch.bfloat16, dims=(64, 64)),
    "float16": Case([9, 100], [9, 1], dtype=torch.float16, dims=(64, 64)),
    "long prefill": Case([1100], [1090], block_size=16),
}


def make(case: Case, seed: int = 0) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Kernel arguments, and the true result in float32 and by sdpa in the dtype of the case, both [T, H_q, D_v]."""
    generator = torch.Generator().manual_seed(seed)
    (num_heads, kv_heads), (key_dim, value_dim), size = case.heads, case.dims, case.block_size
    blocks = [-(-length // size) for length in case.lengths]
    frames = torch.randperm(sum(blocks) + 3, generator=generator)  # three spare ones
    k_pool = torch.full((len(frames), size, kv_heads, key_dim), float("nan"), dtype=case.dtype)
    v_pool = torch.full((len(frames), size, kv_heads, value_dim), float("nan"), dtype=case.dtype)
    table = torch.full((len(blocks), max(blocks) + 2), -1, dtype=torch.int32)
    q = torch.randn(sum(case.queries), num_heads, key_dim, generator=generator).to(case.dtype)
    sinks = torch.randn(num_heads, generator=generator) if case.sinks else None
    scale, exact, low, used, asked = key_dim**-0.5, [], [], 0, 0
    for row, (length, queries) in enumerate(zip(case.lengths, case.queries)):
        mine = frames[used : used + blocks[row]]
        used += blocks[row]
        table[row, : len(mine)] = mine.int()
        keys = torch.randn(length, kv_heads, key_dim, generator=generator).to(case.dtype)
        values = torch.randn(length, kv_heads, value_dim, generator=generator).to(case.dtype)
        for token in range(length):
            k_pool[mine[token // size], token % size] = keys[token]
            v_pool[mine[token // size], token % size] = values[token]
        ask = q[asked : asked + queries]
        asked += queries
        if queries:
            exact.append(dense(ask.float(), keys.float(), values.float(), scale, case, sinks))
            low.append(dense(ask, keys, values, scale, case, sinks))
    arguments = dict(
        q=q,
        k_pool=k_pool,
        v_pool=v_pool,
        block_table=table,
        seq_lens=torch.tensor(case.lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(case.queries).cumsum(0).tolist()], dtype=torch.int32),
        scale=scale,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        max_seqlen_q=max(case.queries),
        max_seqlen_k=max(case.lengths),
    )
    return arguments, torch.cat(exact), torch.cat(low)


def dense(q: Tensor, keys: Tensor, values: Tensor, scale: float, case: Case, sinks: Tensor | None) -> Tensor:
    """One row, one query and one head at a time, straight from the definition; sdpa where it has the features."""
    group = case.heads[0] // case.heads[1]
    out = torch.zeros(len(q), case.heads[0], case.dims[1], dtype=q.dtype)
    for i in range(len(q)):
        last = len(keys) - len(q) + i
        first = max(0, last - case.window + 1) if case.window else 0
        for head in range(case.heads[0]):
            k, v = keys[first : last + 1, head // group], values[first : last + 1, head // group]
            if not case.softcap and sinks is None:
                out[i, head] = torch.nn.functional.scaled_dot_product_attention(q[i, head][None], k, v, scale=scale)[0]
                continue
            score = (k @ q[i, head]) * scale
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            if sinks is not None:
                score = torch.cat([score, sinks[head, None].to(score.dtype)])
            out[i, head] = score.softmax(0)[: len(k)] @ v
    return out


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("name", CASES)
def test_kernel(kernel: str, name: str) -> None:
    arguments, exact, low = make(CASES[name])
    error = (KERNELS[kernel](*arguments.values()).float() - exact).abs()
    if CASES[name].dtype == torch.float32:
        assert error.max() < 1e-5
    else:
        assert error.max() <= 2 * (low.float() - exact).abs().max() + 1e-6


@pytest.mark.parametrize("kernel", HERE)
def test_query_without_keys_gives_zero(kernel: str) -> None:
    """More queries than tokens: the first ones see nothing."""
    arguments, _, _ = make(Case([3], [3]))
    arguments["q"], arguments["max_seqlen_q"] = torch.randn(5, 4, 16), 5
    arguments["cu_seqlens_q"] = torch.tensor([0, 5], dtype=torch.int32)
    out = KERNELS[kernel](*arguments.values())
    assert (out[:2] == 0).all() and (out[2:] != 0).any() and out.isfinite().all()


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("with_pads", [False, True])
def test_write(with_pads: bool, kernel: str) -> None:
    """Only the named tokens are written, to the named slots."""
    k_pool, v_pool = torch.full((5, 4, 2, 8), float("nan")), torch.full((5, 4, 2, 6), float("nan"))
    key, value = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 6)
    source = torch.tensor([1, 2, 5]) if with_pads else None
    slots = torch.tensor([19, 0, 7] if with_pads else [19, 0, 7, 3, 2, 12])
    WRITERS[kernel](k_pool, v_pool, key, value, slots, source)
    for pool, new in ((k_pool, key), (v_pool, value)):
        flat = pool.view(20, 2, -1)
        for index, slot in enumerate(slots.tolist()):
            row, position = divmod(int(source[index]) if source is not None else index, 3)
            assert torch.equal(flat[slot], new[row, :, position])
        assert flat.isnan().all(-1).all(-1).sum() == 20 - len(slots)


def test_operators_have_fakes_and_declared_mutations() -> None:
    """What torch.compile relies on."""
    arguments, _, _ = make(CASES["mixed"])
    new = (torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    for name in HERE:
        torch.library.opcheck(KERNELS[name], tuple(arguments.values()), test_utils=("test_schema", "test_faketensor"))
        slots = torch.tensor([0, 1, 2])
        torch.library.opcheck(WRITERS[name], (*new, slots, None), test_utils=("test_schema", "test_faketensor"))
