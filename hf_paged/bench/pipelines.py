"""The tasks that call `generate` again and again on prompts that begin alike: a chat, reinforcement learning."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .. import PagedCache, PagePool
from ..compat import CACHE_NAME
from .measure import Row, finish, interleave, median
from .tasks import Progress, agreement, prompts

TURNS, TURN_TOKENS, ANSWER_TOKENS = 4, 200, 64
GRPO_ROWS, GRPO_PROMPT, GRPO_NEW = 8, 512, 64


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


def run_grpo(model: Any, pool_options: dict[str, Any], repeats: int, progress: Progress) -> Row:
    """Reinforcement learning as TRL's trainers do it: a prompt in `GRPO_ROWS` equal rows, sampled, then backward and an
    optimizer step on two of them, and all that once more with the new weights. The time of `generate` alone."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt = prompts(vocabulary, [GRPO_PROMPT])["input_ids"].to(model.device).repeat(GRPO_ROWS, 1)
    size = pool_options["block_size"] or 16
    pool = PagePool.for_model(model, num_blocks=2 * GRPO_ROWS * ((GRPO_PROMPT + GRPO_NEW) // size + 2), **pool_options)
    length = dict(max_new_tokens=GRPO_NEW, min_new_tokens=GRPO_NEW, pad_token_id=0, do_sample=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    seen: dict[str, Tensor] = {}
    seconds: dict[str, list[float]] = {"default": [], "paged": []}
    hits: list[int] = []

    def train(side: str) -> None:
        model.load_state_dict(weights)
        optimizer, spent = torch.optim.SGD(model.parameters(), lr=1e-2), 0.0
        torch.manual_seed(0)
        for _ in range(2):
            model.set_attn_implementation("paged" if side == "paged" else "sdpa")
            before = pool.stats().prefix_hit_tokens
            cache = PagedCache(pool) if side == "paged" else None
            finish()
            start = time.perf_counter()
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **length, **{CACHE_NAME: cache})
            finish()
            spent += time.perf_counter() - start
            hits.append(pool.stats().prefix_hit_tokens - before)
            model(out[:2], labels=out[:2]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds[side].append(spent)
        seen[side] = out

    interleave({side: functools.partial(train, side) for side in seconds}, repeats, progress, collect=True)
    model.load_state_dict(weights)
    runs = {side: values[-repeats:] for side, values in seconds.items()}  # without what warmed up
    tokens = GRPO_ROWS * (GRPO_PROMPT + GRPO_NEW)
    kv = dict(default=tokens * pool.bytes_per_block // size, paged=pool.stats().peak_used * pool.bytes_per_block)
    notes = dict(
        kv_bytes=kv, tokens=agreement(seen["default"], seen["paged"], GRPO_PROMPT), what=f"{sum(hits)} stale hits"
    )
    return Row(
        "grpo",
        median(runs["default"]),
        median(runs["paged"]),
        default_runs=runs["default"],
        paged_runs=runs["paged"],
        notes=notes,
    )


PIPELINES = {"chat": run_chat, "grpo": run_grpo}


def positions_of(name: str) -> int:
    """Positions that a pipeline asks of a model."""
    return TURNS * (TURN_TOKENS + ANSWER_TOKENS) if name == "chat" else GRPO_PROMPT + GRPO_NEW
