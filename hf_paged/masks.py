"""The "paged" mask function: it recognises what the kernels do natively, and keeps the exact mask for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from .compat import mask_device, mask_query_length
from .lazy import LazyMask
from .plan import PackedRead
from .state import Width

_adds_masks: dict[Any, bool] = {}  # by config class; not functools.cache, which torch.compile does not trace
_AND = masking_utils.and_masks(causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1, dtype=torch.long)).__code__


def paged_mask(batch_size: int, *, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """The mask function registered for `attn_implementation="paged"`; arguments as in `masking_utils.sdpa_mask`.

    Where the key length comes from a PagedCache, that cache learns which positions are pads, and the mask stays lazy.
    Otherwise this is sdpa's mask, or, for a model that was never made for sdpa, the additive one that it expects.
    """
    additive = adds_masks(type(kwargs.get("config")))
    dense_mask = masking_utils.eager_mask if additive else masking_utils.sdpa_mask
    if not isinstance(kv_length, Width):
        return dense_mask(batch_size, kv_length=kv_length, attention_mask=attention_mask, **kwargs)
    state = kv_length.state
    q_length = mask_query_length(kwargs)
    state.announce_mask(attention_mask, q_length)

    def make() -> Tensor:
        if state.packing:
            raise PackedRead("the mask was read outside the kernels in a packed forward pass")
        exact = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = dense_mask(batch_size, kv_length=int(kv_length), attention_mask=attention_mask, **exact)
        assert mask is not None
        return mask

    pattern = kwargs.get("mask_function", causal_mask_function)
    chunk = chunk_of(pattern)
    window = 0 if chunk else window_of(pattern)
    shape = (batch_size, 1, q_length, int(kv_length))
    dtype = kwargs.get("dtype", torch.float32) if additive else torch.bool
    return LazyMask(state, shape, dtype, mask_device(kwargs), window, chunk, make)


def adds_masks(config_class: Any) -> bool:
    """Whether the model of this config was written for additive masks alone, since it does not claim to support sdpa."""
    if config_class not in _adds_masks:
        models = [m[config_class] for m in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING) if config_class in m]
        _adds_masks[config_class] = not all(getattr(model, "_supports_sdpa", True) for model in models[:1])
    return _adds_masks[config_class]


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """0 for the plain causal pattern, the window for causal and sliding, None for every other one."""
    return 0 if mask_function is causal_mask_function else _overlaid(mask_function, _SLIDING, "sliding_window")


def chunk_of(mask_function: Callable[..., Any]) -> int:
    """The chunk size for causal attention within chunks that are counted from a row's first token, 0 for other patterns."""
    return _overlaid(mask_function, _CHUNKED, "chunk_size") or 0


def _overlaid(mask_function: Callable[..., Any], code: Any, size: str) -> int | None:
    """The size of an overlay on the causal pattern, None where the pattern is another one.

    transformers composes patterns from closures; two of them are the same pattern when they share their code object.
    """
    if getattr(mask_function, "__code__", None) is not _AND:
        return None
    overlay, *rest = _free_variables(mask_function)["mask_functions"]
    if rest == [causal_mask_function] and getattr(overlay, "__code__", None) is code:
        value = _free_variables(overlay)[size]
        return value if isinstance(value, int) and value > 0 else None
    return None


def _free_variables(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
