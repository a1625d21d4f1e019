"""A shortage of blocks in models that keep more than blocks: no state has moved, and the same cache can be used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hybrids import needs_states
from test_own_layers import built
from tiny import CACHE, VOCAB, default, make_pool
from transformers import DynamicCache

from hf_paged import PagedCache, PagePool, PoolExhausted
from hf_paged.compat import RELEASE
from hf_paged.tables import BlockTables

KINDS = ["qwen3_next", "falcon_h1", "jamba", "zaya", "zamba2", "recurrent_gemma"]
KINDS += ["deepseek_v32", "minimax_m3_vl_text"]
if RELEASE >= (5, 24):  # before, it notes positions on the cache, where no reset reaches them
    KINDS += ["qwen4_exp_text"]
PROMPT, NEW = 13, 14  # tokens: 4 blocks of 4 per row and group for the prompt


def pool_for(model: Any) -> PagePool:
    pool = make_pool(model, 60)
    if not pool.geometry:
        pytest.skip("nothing is paged in this release of transformers")
    return pool


def all_but(pool: PagePool, left: int) -> BlockTables:
    """Somebody who holds all free blocks but `left`."""
    guest = BlockTables(pool.manager)
    guest.add_rows(1)
    guest.append([(pool.stats().free - left) * pool.block_size])
    return guest


@needs_states
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_again_with_the_same_cache(kind: str, chunk: int | None) -> None:
    """Short in the first layer, in the second chunk if there are chunks, and in a decode step."""
    model = built(kind)
    if chunk and kind == "recurrent_gemma":
        pytest.skip("transformers cannot cut a prefill of this model")
    own = model.config._attn_implementation
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    flags = dict(max_new_tokens=NEW, prefill_chunk_size=chunk, eos_token_id=None)
    want = default(model, dict(input_ids=ids), own, **flags)
    assert want[:, PROMPT:].unique().numel() > 5, "the tokens are degenerate and prove nothing"
    model.set_attn_implementation("paged")
    pool = pool_for(model)
    guests: list[BlockTables] = []

    def take_the_rest(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not guests:
            guests.append(all_but(pool, 0))
        return scores

    with PagedCache(pool) as cache:
        for left in (0, 5 * len(pool.groups), pool.num_blocks):
            guests[:] = [all_but(pool, left)] if left < pool.num_blocks else []
            with pytest.raises(PoolExhausted):
                model.generate(ids, **flags, logits_processor=[take_the_rest], **{CACHE: cache})
            guests.pop().free()
            pool.check_integrity()
        cached = cache.get_seq_length()
        assert cached == 16
        assert torch.equal(
            want, model.generate(want[:, : cached + 1], **{**flags, "max_new_tokens": 10}, **{CACHE: cache})
        )
    model.set_attn_implementation(own)


@needs_states
@pytest.mark.parametrize("kind", KINDS)
def test_forward_passes_by_hand(kind: str) -> None:
    """An empty cache, then a filled one, whose states must be what they were."""
    model = built(kind)
    ids = torch.randint(3, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    pool, dynamic = pool_for(model), {CACHE: DynamicCache(config=model.config)}
    with PagedCache(pool) as cache, torch.no_grad():
        steps = [(new, model(new, **dynamic, use_cache=True).logits) for new in (ids, ids[:, :8])]
        for new, want in steps:
            guest = all_but(pool, 0)
            with pytest.raises(PoolExhausted):
                model(new, **{CACHE: cache}, use_cache=True)
            guest.free()
            torch.testing.assert_close(model(new, **{CACHE: cache}, use_cache=True).logits, want, rtol=1e-4, atol=1e-4)
            pool.check_integrity()
