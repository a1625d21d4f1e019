"""Pads, batch neighbours, lengths, numbers: what must not change a token, and what must not be stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from tiny import CACHE, default, make_pool, paged, prompts

from hf_paged import PagedCache, PagePool
from hf_paged.kernels import KERNELS


@contextlib.contextmanager
def kernel_calls(pool: PagePool) -> Iterator[list[tuple[int, int]]]:
    """Record (rows, query tokens) of every call of the pool's kernel."""
    calls: list[tuple[int, int]] = []
    kernel, name = KERNELS[pool.kernel], pool.kernel

    def spy(q: Any, k: Any, v: Any, table: Any, *rest: Any) -> Any:
        calls.append((table.shape[0], q.shape[0]))
        return kernel(q, k, v, table, *rest)

    KERNELS[name] = spy
    try:
        yield calls
    finally:
        KERNELS[name] = kernel


def test_pads_are_not_stored(llama: Any) -> None:
    pool, lengths = make_pool(llama), [16, 21, 1, 0]
    with PagedCache(pool) as cache, torch.no_grad():
        llama(**prompts(lengths), **{CACHE: cache})
        assert cache.lengths == lengths
        assert [len(blocks) for blocks in cache.block_tables] == [4, 6, 1, 0]
        assert pool.stats().used == 11


def test_batch_and_padding_do_not_change_tokens(llama: Any) -> None:
    """Batches of 1, 2, 4 and 8, and any further padding: the tokens of the row alone."""
    lengths = [3, 9, 16, 17, 5, 12, 8, 1]
    inputs = prompts(lengths)
    alone = []
    for row in range(8):
        single = {name: value[row : row + 1, -lengths[row] :] for name, value in inputs.items()}
        alone.append(paged(llama, single, make_pool(llama), max_new_tokens=12)[0, lengths[row] :].tolist())
    for batch in (1, 2, 4, 8):
        for more in (0, 1, 13):
            for start in range(0, 8, batch):
                part = {name: value[start : start + batch] for name, value in inputs.items()}
                part = {name: torch.nn.functional.pad(value, (more, 0)) for name, value in part.items()}
                out = paged(llama, part, make_pool(llama), max_new_tokens=12)
                assert out[:, -12:].tolist() == alone[start : start + batch]


def test_bfloat16_error_is_at_most_twice_that_of_sdpa() -> None:
    """Logits of a ragged batch, prefill and 8 decode steps, against the same weights in float32."""
    inputs, steps = prompts([30, 37, 12]), torch.randint(3, 160, (3, 8), generator=torch.Generator().manual_seed(1))

    def logits(dtype: torch.dtype, cached: bool, attn: str) -> torch.Tensor:
        module = tiny.build("llama", attn, dtype=torch.bfloat16).to(dtype)  # the weights are rounded in all cases
        mask, parts = inputs["attention_mask"], []
        with torch.no_grad():
            cache = PagedCache(make_pool(module)) if cached else None
            out = module(**inputs, use_cache=True, **({CACHE: cache} if cached else {}))
            for step in range(8):
                parts.append(out.logits[:, -1:].float())
                mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
                position = mask.sum(1, keepdim=True) - 1
                past = {CACHE: getattr(out, CACHE)}
                out = module(steps[:, step : step + 1], attention_mask=mask, position_ids=position, **past)
        return torch.cat(parts, 1)

    exact = logits(torch.float32, False, "sdpa")
    ours = (logits(torch.bfloat16, True, "paged") - exact).abs()
    theirs = (logits(torch.bfloat16, False, "sdpa") - exact).abs()
    assert ours.mean() <= 2 * theirs.mean() and ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize("block_size", [4, 16])
def test_every_padded_length(block_size: int, llama: Any) -> None:
    """All lengths up to two blocks and one, and around multiples of 32, with a row that is all padding."""
    lengths = sorted({*range(1, 2 * block_size + 2), *range(31, 35), *range(63, 67)})
    for length in lengths:
        for inputs in (prompts([length]), prompts([length, max(length - 3, 1), 0])):
            want = default(llama, inputs, max_new_tokens=3)
            assert torch.equal(want, paged(llama, inputs, make_pool(llama, 60, block_size), max_new_tokens=3)), length


def test_neighbours_do_not_matter(llama: Any) -> None:
    """The same prompt with other neighbours and another max_new_tokens."""
    outs = []
    for neighbours, new in [([9, 4], 6), ([9, 30], 20), ([9, 0], 11)]:
        inputs = prompts(neighbours, seed=3)
        outs.append(paged(llama, inputs, make_pool(llama), max_new_tokens=new)[0, -new:].tolist()[:6])
    assert outs[0] == outs[1] == outs[2]


@pytest.mark.parametrize("chunk", [1, 7, 4, 5, 999999])
def test_chunked_prefill(chunk: int, llama: Any) -> None:
    """Left-padded rows in chunks, some of which are all padding."""
    inputs = prompts([23, 9, 2])
    want = default(llama, inputs, max_new_tokens=8)
    assert torch.equal(want, paged(llama, inputs, make_pool(llama), max_new_tokens=8, prefill_chunk_size=chunk))


def test_right_padding(llama: Any) -> None:
    """A row that is read at a pad gets what the default cache gives it."""
    ids = prompts([9, 9])["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad(), PagedCache(make_pool(llama)) as cache:
        got = llama(ids, attention_mask=mask, **{CACHE: cache}).logits
        llama.set_attn_implementation("sdpa")
        torch.testing.assert_close(got, llama(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-4)
        assert cache.lengths == [9, 6]


def test_stored_token_masked_out_later(llama: Any) -> None:
    """A mask that hides a cached token goes the dense way, with the exact mask."""
    ids = prompts([12])["input_ids"]
    mask = torch.ones_like(ids)
    with torch.no_grad(), PagedCache(make_pool(llama)) as cache:
        llama(ids[:, :8], **{CACHE: cache})
        mask[0, 2:4] = 0
        got = llama(ids[:, 8:], attention_mask=mask, **{CACHE: cache}).logits
        llama.set_attn_implementation("sdpa")
        past = llama(ids[:, :8], use_cache=True)
        want = llama(ids[:, 8:], attention_mask=mask, **{CACHE: getattr(past, CACHE)}).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_pads_cannot_be_called_real_later(llama: Any) -> None:
    inputs = prompts([9, 4])
    with torch.no_grad(), PagedCache(make_pool(llama)) as cache:
        llama(**inputs, **{CACHE: cache})
        used = cache.pool.stats().used
        for mask in (torch.ones(2, 10), None):
            with pytest.raises(ValueError, match="position 0 of row 1 holds a token, but it was a pad"):
                llama(torch.tensor([[5], [6]]), attention_mask=mask, **{CACHE: cache})
        assert cache.lengths == [9, 4] and cache.pool.stats().used == used
        with pytest.raises(ValueError, match="attention_mask has 1 columns, but 9 positions are cached and 1 are new"):
            llama(torch.tensor([[5], [6]]), attention_mask=torch.ones(2, 1), **{CACHE: cache})


def test_mask_of_four_dimensions(llama: Any) -> None:
    """A mask that the caller built goes the dense way."""
    ids = prompts([6])["input_ids"]
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.triu(torch.ones(6, 6), 1).bool(), torch.finfo(torch.float32).min)
    mask[..., 2] = torch.finfo(torch.float32).min
    mask[0, 0, 2, 2] = 0
    with torch.no_grad(), PagedCache(make_pool(llama)) as cache:
        got = llama(ids, attention_mask=mask, **{CACHE: cache}).logits
        llama.set_attn_implementation("sdpa")
        torch.testing.assert_close(got, llama(ids, attention_mask=mask).logits, rtol=1e-4, atol=1e-4)
