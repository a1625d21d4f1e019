"""What differs between the releases of transformers that hf_paged supports (5.0 to 5.24), in one place."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationMixin, LlamaForCausalLM, cache_utils
from transformers.utils import import_utils

RELEASE = Version(transformers.__version__).release[:2]

# The argument that takes a cache in a model's forward pass and in `generate`, and names it in outputs: `cache` in newer
# releases, `past_key_values` in older ones, and a deprecated alias for a while between.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

# What assisted decoding asks for on its assistant's behalf, as `cache_implementation`; a name for it up to 5.10.
ASSISTANT_CACHES = (None, "dynamic_full")

# What `crop(0)` keeps: nothing up to about 5.10, where the argument is a length, and everything in later releases.
CROP_ZERO_KEEPS_ALL = "tokens_to_remove" in inspect.signature(cache_utils.DynamicLayer.crop).parameters

# Whether `crop(n)` with n > 0 keeps n positions. Since 5.18 it is refused.
CROP_TO_LENGTH = RELEASE < (5, 18)

# The states of a layer that has some beside its keys and values; releases without it have no such layers, and in those
# where it holds a single state, the whole layer stays transformers' own.
LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", type("NoStates", (), {}))
HAS_HYBRID_LAYERS = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters

# Whether `generate` takes ids for the whole sequence, whatever the mask covers, and cuts every step by position, as up to 5.9.
CUTS_BY_POSITION = (
    "next_sequence_length" not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)

# Whether a prefill in chunks goes on from what is cached. In 5.17 it starts over, whatever the cache holds.
CHUNKS_GO_ON = RELEASE >= (5, 24)


def makes_own_cache(model: Any) -> bool:
    """Whether a model has states and no `Cache` of this release can hold them: 5.0 has one of its own for every such model."""
    return not hasattr(cache_utils, "LinearAttentionLayer") and bool(getattr(model, "_is_stateful", False))


def positions_in_modules(model: Any) -> bool:
    """Whether a model notes in itself, per row of the batch, how far positions and tokens are apart. Later releases ask for
    positions before the prefill, and those of a call are there for all its steps."""
    return RELEASE < (5, 10) and any(hasattr(module, "rope_deltas") for module in model.modules())


def after_chunks(model_kwargs: dict[str, Any], width: int) -> None:
    """Note that `width` positions have been computed. Up to 5.9 a prefill in chunks counts one more, with which every window
    would end one token early."""
    positions = model_kwargs.get("cache_position")
    if positions is not None:
        model_kwargs["cache_position"] = positions.new_tensor([width - 1])


def only_states(cache: Any) -> bool:
    """Whether no layer of a cache has keys and values. `is_linear` of older releases says so of layers with both, too."""
    return not any(isinstance(layer, cache_utils.CacheLayerMixin) for layer in cache.layers)


def query_length(length_or_positions: Any) -> int:
    """Number of queries, from what a release hands to `get_mask_sizes`: the number, or up to 5.9 their positions."""
    if isinstance(length_or_positions, int):
        return length_or_positions
    return int(length_or_positions.shape[0])


def mask_query_length(mask_arguments: dict[str, Any]) -> int:
    """The same, from the arguments of a mask function."""
    return query_length(
        mask_arguments["q_length"] if "q_length" in mask_arguments else mask_arguments["cache_position"]
    )


def mask_device(mask_arguments: dict[str, Any]) -> Any:
    """The device that a mask function is asked for."""
    positions = mask_arguments.get("cache_position")
    return mask_arguments.get("device", "cpu" if positions is None else positions.device)


def flash_attention_installed(version: int) -> bool:
    """Whether the package of FlashAttention `version` is there, on a machine with a GPU. Versions 2 and 4 share the module
    `flash_attn`; transformers can tell them apart. Releases that do not know a version do not find it."""
    is_available = getattr(import_utils, f"is_flash_attn_{version}_available", None)
    return is_available is not None and bool(is_available())


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on `device`, None where it is off or unknown."""
    known = torch.amp.autocast_mode.is_autocast_available(device.type)
    return torch.get_autocast_dtype(device.type) if known and torch.is_autocast_enabled(device.type) else None
