"""Prompts that begin alike: what the pool still holds of them is taken over, what rows of a batch share is computed once.

Works on whole blocks, and only where a prompt's keys and values are a function of its ids alone.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import weights
from .blocks import Int64
from .history import History
from .packing import ALLOWED, asked_for, keeps_only_blocks, wants_last_logits
from .plan import Bool
from .prefix import Match, PrefixIndex, digest_of
from .state import CacheState, Packing

if TYPE_CHECKING:
    from .cache import PagedCache

MIN_SAVED = 64  # tokens; below, a forward pass of its own for what rows share costs more than it saves
# Keys rotated by these depend on how long the sequence was when they were computed.
VARYING_ROPE = {"dynamic", "longrope"}
# Model types that compute a token fed alone otherwise than among others: what they generate is no prefix of a prompt.
TELLS_STEPS_APART = {"moshi"}
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech|sound).*token_(id|index)$")


class Prompt(NamedTuple):
    """The ids of a prefill, where they are all that its keys and values depend on."""

    history: History
    rows: list[Int64]  # the real tokens of every row
    limits: list[int]  # how many of them may be taken over; one at least has to be computed
    places: Int64  # [B, W] real tokens up to each padded position
    device: torch.device  # of the ids


class Adoption(NamedTuple):
    """What every row takes over. Valid as long as the pool's lock is held."""

    matches: list[Match]
    lengths: Int64  # [B] tokens


def read(model: Any, input_ids: Tensor, whole: bool, model_kwargs: dict[str, Any], cache: PagedCache) -> Prompt | None:
    """What this prefill, of ids for the `whole` sequence or for what follows the cache, is about, in a model that draws
    nothing at random and is not instrumented. None where keys and values may depend on more than ids, or where it isn't
    known what the cache holds."""
    state = cache._state
    if not _depends_on_ids_alone(model, input_ids, model_kwargs, state):
        return None
    root = weights.fingerprint(model, cache.salt)
    if root is None:
        return None
    ids = input_ids.detach().cpu().numpy()
    mask = model_kwargs.get("attention_mask")
    width = ids.shape[1] if whole else state.width + ids.shape[1]
    real = np.ones((len(ids), width), bool) if mask is None else mask.detach().bool().cpu().numpy()
    tokens = _whole(ids, whole, real, root, state)
    if tokens is None or not real[:, -1].all():
        return None
    count = np.cumsum(real, 1)
    if not _counts_tokens(model_kwargs.get("position_ids"), count, real):
        return None
    rows = [row[keep] for row, keep in zip(tokens, real)]
    placeholders = [value for name, value in vars(model.config).items() if _PLACEHOLDER.search(name)]
    limits = [min([len(row) - 1, *np.flatnonzero(np.isin(row, placeholders))[:1].tolist()]) for row in rows]
    return Prompt(History(root, tokens, ids.shape[1]), rows, limits, count, input_ids.device)


def _depends_on_ids_alone(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any], state: CacheState) -> bool:
    mask = model_kwargs.get("attention_mask")
    return (
        not model.config.is_encoder_decoder
        and model.config.model_type not in TELLS_STEPS_APART
        and model.config._attn_implementation == "paged"
        and input_ids.dim() == 2
        and (mask is None or mask.dim() == 2)
        and asked_for(model_kwargs) <= ALLOWED
        and wants_last_logits(model_kwargs)
        and keeps_only_blocks(state.pool)
        and not state.pool.stores_pads
        and not _varying_rope(model.config.get_text_config())
    )


def _varying_rope(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one per layer type
    return any(kind.get("rope_type", kind.get("type")) in VARYING_ROPE for kind in kinds)


def _whole(ids: Int64, whole: bool, real: Bool, root: bytes, state: CacheState) -> Int64 | None:
    """The tokens at all positions, `real` or not: the cached ones, which `ids` repeat if they are the `whole` sequence, and
    the new ones."""
    cached = state.width
    if real.shape != (len(ids), ids.shape[1] if whole else cached + ids.shape[1]):
        return None
    if not cached:
        return ids
    history = state.history
    if history is None or history.root != root or history.known < cached:
        return None
    past = history.tokens()[:, :cached]
    if len(past) != len(ids):
        return None
    if not whole:
        return np.concatenate([past, ids], 1)
    return ids if (past == ids[:, :cached])[real[:, :cached]].all() else None


def _counts_tokens(position_ids: Tensor | None, count: Int64, real: Bool) -> bool:
    """Whether a token's position is its place in its row, pads not counted."""
    if position_ids is None:
        return bool(real.all())  # the model counts pads
    given = position_ids.detach().cpu().numpy()
    last = min(given.shape[-1], count.shape[1])
    return given.ndim == 2 and bool((given[:, -last:] == count[:, -last:] - 1)[real[:, -last:]].all())


def compute_shared(
    model: Any, prompt: Prompt, generation_config: Any, model_kwargs: dict[str, Any], cache: PagedCache
) -> None:
    """Compute what several rows begin with, and leave it in the prefix index: shorter beginnings first, the longer ones go on
    from there."""
    pool, size = cache.pool, cache.pool.block_size
    chains = [_digests(row[:limit], pool.prefixes) for row, limit in zip(prompt.rows, prompt.limits)]
    rows_with = Counter(digest for chain in chains for digest in chain)
    ends: dict[bytes, tuple[int, int]] = {}  # of a shared beginning: its length in blocks, a row that has it
    for row, chain in enumerate(chains):
        blocks = sum(rows_with[digest] > 1 for digest in chain)
        if blocks:
            ends[chain[blocks - 1]] = blocks, row
    for digest, (blocks, row) in sorted(ends.items(), key=lambda item: item[1]):
        tokens = prompt.rows[row][: blocks * size]
        known = pool.prefixes.match(prompt.history.root, tokens, len(tokens)).length
        if (rows_with[digest] - 1) * (len(tokens) - known) >= MIN_SAVED:
            with type(cache)(pool, salt=cache.salt) as alone:
                alone._state.shares = True
                ids = torch.from_numpy(tokens)[None].to(prompt.device)
                _prefill_alone(model, ids, generation_config, model_kwargs, cache, alone)


def _digests(tokens: Int64, prefixes: PrefixIndex) -> list[bytes]:
    chain, digest = [], b""
    for block in prefixes.blocks(tokens):
        digest = digest_of(digest, block)
        chain.append(digest)
    return chain


def _prefill_alone(
    model: Any,
    ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    cache: PagedCache,
    alone: PagedCache,
) -> None:
    kwargs = {name: alone if value is cache else value for name, value in model_kwargs.items()}
    kwargs["attention_mask"] = torch.ones_like(ids)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
    model._prefill(ids, generation_config, kwargs)


def adopt_packed(prompt: Prompt, real: Bool, cache: PagedCache) -> Packing | None:
    """Take over all that is known of each row, and say what a packed pass has to compute of the new positions, `real` bool
    [B, q_length]. None, with nothing taken over, where a padded pass would compute no more."""
    if cache.get_seq_length():
        return Packing(real, real)
    with cache.pool.manager.lock:
        adoption = _find(prompt, cache)
        new = real & (prompt.places > adoption.lengths[:, None])
        _, width = _at_common_width(prompt, adoption, cache)
        if new.sum() == real[:, width:].size:
            return None
        cache.adopt(*adoption, 0, None)
        _settle(cache)
    return Packing(new, real)


def adopt_at_common_width(prompt: Prompt, cache: PagedCache) -> None:
    """Take over as much as ends at one padded position in all rows, for a padded pass over the rest."""
    with cache.pool.manager.lock:
        adoption, width = _at_common_width(prompt, _find(prompt, cache), cache)
        if width:
            real = np.diff(prompt.places[:, :width], axis=1, prepend=0) > 0
            cache.adopt(*adoption, width, None if real.all() else real)
        _settle(cache)


def _settle(cache: PagedCache) -> None:
    if not cache.pool.prefix_caching:
        cache.pool.prefixes.clear()


def _find(prompt: Prompt, cache: PagedCache) -> Adoption:
    """What each row of an empty cache can take over."""
    prefixes = cache.pool.prefixes
    matches = [prefixes.match(prompt.history.root, row, limit) for row, limit in zip(prompt.rows, prompt.limits)]
    return Adoption(matches, np.array([match.length for match in matches]))


def _at_common_width(prompt: Prompt, adoption: Adoption, cache: PagedCache) -> tuple[Adoption, int]:
    """As much of an adoption as ends at one padded position in all rows, and that position."""
    fit, lengths = cache.pool.prefixes.fit, adoption.lengths
    while True:
        width = int((prompt.places <= lengths[:, None]).sum(1).min())
        wanted = prompt.places[:, width - 1] if width else np.zeros_like(lengths)
        lengths = np.array([fit(match.nodes, int(length)) for match, length in zip(adoption.matches, wanted)])
        if (lengths == wanted).all():
            return Adoption(adoption.matches, lengths), width
