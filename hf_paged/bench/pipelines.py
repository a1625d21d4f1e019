"""The tasks that call `generate` again and again with prompts that begin alike: a chat, a few-shot evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .. import PagedCache, PagePool
from ..compat import CACHE_NAME
from .measure import Row, interleave, median
from .tasks import Progress, agreement, prompts

TURNS, TURN_TOKENS, ANSWER_TOKENS = 4, 200, 64


def run_chat(model: Any, pool_options: dict[str, Any], repeats: int, progress: Progress) -> Row:
    """Every turn: all ids so far and 200 new ones in, 64 out. The default cache made anew each turn, and kept from turn to
    turn, against a fresh `PagedCache` each turn on one pool that knows nothing at the start."""
    vocabulary = model.config.get_text_config().vocab_size
    user = [prompts(vocabulary, [TURN_TOKENS], seed)["input_ids"].to(model.device) for seed in range(TURNS)]
    size = pool_options["block_size"] or 16
    pool = PagePool.for_model(
        model, num_blocks=TURNS * (TURN_TOKENS + ANSWER_TOKENS) // size + TURNS + 1, **pool_options
    )
    length = dict(max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, pad_token_id=0)
    seen: dict[str, Tensor] = {}
    computed: list[int] = []

    def chat(side: str, attention: str, kept: Any = None) -> None:
        model.set_attn_implementation(attention)
        ids = user[0][:, :0]
        for turn in user:
            ids = torch.cat([ids, turn], 1)
            cache = PagedCache(pool) if side == "paged" else kept
            hits = pool.stats().prefix_hit_tokens
            computed.append(ids.shape[1])
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), **length, **{CACHE_NAME: cache})
            computed[-1] -= pool.stats().prefix_hit_tokens - hits
        seen[side] = ids

    def paged() -> None:
        pool.clear_prefix_cache()
        computed.clear()
        chat("paged", "paged")

    ways = dict(
        default=lambda: chat("default", "sdpa"),
        kept=lambda: chat("kept", "sdpa", DynamicCache(config=model.config)),
        paged=paged,
    )
    seconds = interleave(ways, repeats, progress, collect=True)
    notes = dict(
        tokens=agreement(seen["default"], seen["paged"], TURN_TOKENS),
        kept_cache=median(seconds["kept"]),
        what=f"tokens computed in each prefill: {computed}",
    )
    return Row(
        "chat",
        median(seconds["default"]),
        median(seconds["paged"]),
        default_runs=seconds["default"],
        paged_runs=seconds["paged"],
        notes=notes,
    )


PIPELINES = {"chat": run_chat}
