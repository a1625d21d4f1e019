"""Ragged prompts without pads: all real tokens of all rows as one row of the model, each with its own position.

The layers outside attention treat every token by itself, so they neither know nor care whose token it is; the kernels do
(`cu_seqlens_q`). A model for which that does not hold gives itself away: it reads keys, values or mask outside the
kernels, or leaves keys unread by a kernel. It is run padded then, and if that goes well its class is remembered.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .compat import CACHE_NAME
from .device_plan import send
from .layout import LayerGeometry
from .plan import Bool, PackedRead
from .pool import PagePool
from .state import CacheState, Packing

if TYPE_CHECKING:
    from .cache import PagedCache

logger = logging.getLogger(__name__)

_padded_only: weakref.WeakSet[type] = weakref.WeakSet()  # classes of models that cannot be run packed
ALLOWED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache", "past_key_values"}


def says_nothing(value: Any) -> bool:
    """Whether an argument is as good as absent: None, False, or the empty outputs of encoders that had no image."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def asked_for(model_kwargs: dict[str, Any]) -> set[str]:
    """The arguments that say something."""
    return {name for name, value in model_kwargs.items() if not says_nothing(value)}


def wants_last_logits(model_kwargs: dict[str, Any]) -> bool:
    """Whether the logits of each row's last token are all that is asked for."""
    wanted = model_kwargs.get("logits_to_keep", 1)
    return isinstance(wanted, int) and wanted == 1


def keeps_only_blocks(pool: PagePool) -> bool:
    """Whether no layer keeps anything per row beside its keys and values."""
    return not any(
        layer.states or layer.beside if isinstance(layer, LayerGeometry) else layer.name != "DummyLayer"
        for layer in pool.layers
    )


def packable(model: Any, new_ids: Tensor, model_kwargs: dict[str, Any], state: CacheState) -> Bool | None:
    """Which of `new_ids` are real, bool [B, q_length], where this prefill may run packed: every row ends in a real token, and
    nothing is asked for but the logits of each row's last token. None otherwise."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is None or positions.dim() != 2 or type(model) in _padded_only or not keeps_only_blocks(state.pool):
        return None
    if (
        model.config._attn_implementation != "paged"
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        return None
    if not asked_for(model_kwargs) <= ALLOWED or not wants_last_logits(model_kwargs):
        return None
    if positions.shape[0] != len(new_ids) or (state.width and state.tables.num_rows != len(new_ids)):
        return None
    if mask is not None and mask.shape[1] != state.width + new_ids.shape[1]:
        return None
    return state.ragged(mask, *new_ids.shape)


class Unpackable(Exception):
    """A packed pass failed. Whether packing is to blame, a padded pass tells."""


def run_padded(model: Any, reason: str) -> None:
    """Pack no prompt for models of this class any more, since a padded pass went well where a packed one had failed."""
    _padded_only.add(type(model))
    logger.info("%s runs padded, not packed: %s", type(model).__name__, reason)


def prefill(model: Any, new_ids: Tensor, pack: Packing, model_kwargs: dict[str, Any], cache: PagedCache) -> Any:
    """Run a packed forward pass over those of `new_ids` [B, q_length] that `pack` calls new.

    Returns the model's output with logits [B, 1, vocabulary]. Raises `Unpackable` where the model cannot be run so, and
    `PoolExhausted`; the cache is as before then.
    """
    state, width, new = cache._state, cache._state.width, pack.new
    q_length = new_ids.shape[1]
    source, last = send([np.flatnonzero(new), np.cumsum(new.sum(1)) - 1], new_ids.device)  # [T], [B]
    kwargs = {
        **model_kwargs,
        "attention_mask": None,
        "position_ids": model_kwargs["position_ids"][:, -q_length:].reshape(1, -1)[:, source],
    }
    if "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = last
    state.packing = pack
    try:
        inputs = model.prepare_inputs_for_generation(
            new_ids.reshape(1, -1)[:, source], is_first_iteration=True, **kwargs
        )
        outputs = model(**inputs, return_dict=True)
        plan = state.plan
        if plan is None or not plan.written or not plan.written <= plan.attended:
            raise PackedRead("some layer's keys were not read by a kernel")
        if outputs.get(CACHE_NAME) not in (None, cache):
            raise PackedRead("the model has put this cache into one of its own")
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the model
        cache.rewind(width)
        raise
    except Exception as error:
        cache.rewind(width)
        raise Unpackable(str(error)) from error
    finally:
        state.packing = None
    logits = outputs.logits[0]  # [B or T, vocabulary]
    outputs.logits = (logits if len(logits) == len(last) else logits[last])[:, None]
    return outputs
