"""Best-first search over hundreds of continuations of one prompt, each a cache that shares its past with the others.

Every round takes the most promising leaves, gives each a few children in one batched forward pass, and drops the leaves
that have fallen too far behind. Runs SmolLM2-135M-Instruct in float32; at the end the best continuations are scored once
more by a plain forward pass, and the scores have to agree.
"""

import math
import sys
import time
from typing import Any, NamedTuple

import torch
from smollm2 import load
from torch import Tensor

import hf_paged

QUESTION = "Give me one short sentence about the sea."
ROUNDS, EXPAND, CHILDREN, KEEP = 60, 8, 4, 200


class Leaf(NamedTuple):
    """One branch of the tree."""

    tokens: list[int]  # after the prompt
    log_probability: float
    cache: hf_paged.PagedCache  # of one row: the prompt and all tokens but the last
    finished: bool

    @property
    def score(self) -> float:
        """Mean log probability of a token, with a bonus for length that keeps short branches from winning by default."""
        return self.log_probability / math.pow(len(self.tokens), 0.8)


@torch.inference_mode()
def expand(model: Any, leaves: list[Leaf], eos: int) -> list[Leaf]:
    """The likeliest `CHILDREN` of every leaf, all leaves in one forward pass."""
    batch = hf_paged.PagedCache.join([leaf.cache for leaf in leaves])  # rows of any length; copies nothing
    mask = torch.cat([batch.attention_mask, torch.ones(len(leaves), 1, dtype=torch.long)], 1).to(model.device)
    last = torch.tensor([leaf.tokens[-1:] for leaf in leaves], device=model.device)
    logits = model(last, attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, cache=batch).logits
    return [
        child
        for row, leaf in enumerate(leaves)
        for child in children(leaf, logits[row, -1], batch.fork(rows=[row]), eos)
    ]


def children(leaf: Leaf | None, logits: Tensor, cache: hf_paged.PagedCache, eos: int) -> list[Leaf]:
    """The likeliest next tokens, each with a cache of its own that shares every block with `cache`."""
    tokens, before = (leaf.tokens, leaf.log_probability) if leaf else ([], 0.0)
    best = torch.log_softmax(logits, -1).topk(CHILDREN)
    return [
        Leaf([*tokens, token], before + value, cache.fork(), token == eos)
        for value, token in zip(best.values.tolist(), best.indices.tolist())
    ]


def main() -> str | None:
    """Returns what is wrong, None if nothing."""
    model, tokenizer = load(torch.float32)
    eos = tokenizer.eos_token_id
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ids = prompt["input_ids"].to(model.device)
    pool = hf_paged.PagePool.for_model(model, memory="1GiB")

    start, expanded, most = time.perf_counter(), 0, 0
    root = hf_paged.PagedCache(pool)
    with torch.inference_mode():
        leaves = children(None, model(ids, cache=root).logits[0, -1], root, eos)
    for _ in range(ROUNDS):
        open_leaves = sorted((leaf for leaf in leaves if not leaf.finished), key=lambda leaf: -leaf.score)[:EXPAND]
        if not open_leaves:
            break
        chosen = {id(leaf) for leaf in open_leaves}
        leaves = [leaf for leaf in leaves if id(leaf) not in chosen] + expand(model, open_leaves, eos)
        leaves = sorted(leaves, key=lambda leaf: -leaf.score)[:KEEP]  # the caches of the others are dropped with them
        expanded += len(open_leaves)
        most = max(most, len(leaves))
    seconds = time.perf_counter() - start

    pool.check_integrity()
    stats = pool.stats()
    copies = sum(-(-sum(leaf.cache.lengths) // stats.block_size) for leaf in leaves)
    print(
        f"{expanded} branches extended in {seconds:.1f} s, {most} held at once, {stats.used} blocks for {len(leaves)}"
    )
    print(f"of them, which would take {copies} blocks if each kept a copy of its past\n")
    finished = [leaf for leaf in leaves if leaf.finished] or leaves
    worst = 0.0
    for leaf in finished[:3]:
        row = torch.cat([ids, torch.tensor([leaf.tokens], device=ids.device)], 1)
        with torch.inference_mode():
            logits = torch.log_softmax(model(row[:, :-1]).logits[0, ids.shape[1] - 1 :], -1)
        again = float(logits.gather(1, row[0, ids.shape[1] :, None]).sum())
        worst = max(worst, abs(again - leaf.log_probability))
        print(f"{leaf.score:7.3f}  {tokenizer.decode(leaf.tokens, skip_special_tokens=True)!r}")
    print(f"\nlargest difference to a plain forward pass: {worst:.1e}")
    return None if worst < 1e-2 else "the scores differ from those of a plain forward pass"


if __name__ == "__main__":
    sys.exit(main())
