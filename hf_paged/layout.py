"""What the layers of a model keep from one forward pass to the next: which of it is paged, and in what shapes."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from .blocks import Int64
from .compat import CACHE_NAME, HAS_HYBRID_LAYERS, makes_own_cache
from .kernels.backend import SINKS, SOFTCAP

logger = logging.getLogger(__name__)

PAGED_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
PAGED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)  # these alone: their subclasses keep more than keys and values
SLIDING_MASKS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
HYBRID_LAYERS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")


# Model types with a state in their modules, not in the cache: one row of it per row of the batch, in that order.
STATE_IN_MODULES = {"recurrent_gemma"}

# Model types whose indexers look at pads as well, mask or not, so that the results at pads decide which keys are seen.
READS_PADS = {"minimax_m3_vl_text"}


class LayerGeometry(NamedTuple):
    """The shape of one layer's keys, `[.., kv_heads, .., key_dim]`, and values.

    `states` is the number of convolution or recurrent states that the layer keeps beside them, as transformers does.
    `window` is the number of tokens that it looks back at most, 0: all; older ones need not be kept. Where it is `chunked`,
    that is the size of a chunk, and it looks back to the beginning of the chunk only. `beside` makes
    transformers' own layer where that keeps more of every token than keys and values, such as the keys of an indexer.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    states: int = 0
    window: int = 0
    beside: OwnLayer | None = None
    chunked: bool = False


class Group(NamedTuple):
    """Layers that share a block table, since they keep the same tokens."""

    window: int  # tokens that its layers look back; 0: all
    layers: list[int]
    chunked: bool = False  # whether the window is a chunk: tokens of the chunks before are not seen

    def first_seen(self, lengths: Int64) -> Int64:
        """The first token that a query behind each of these numbers of tokens may see; below 0: all of them."""
        return lengths // self.window * self.window if self.chunked else lengths - self.window + 1


def groups_of(layers: Sequence[LayerGeometry | OwnLayer]) -> list[Group]:
    """Cut the paged layers into groups of equal size, each of one window, layers that keep everything first.

    A frame is room for one block of one group, whatever its window, so all groups draw on one free list and no memory is
    set apart for one of them (the hybrid allocator of vLLM works so). Where layers differ in shape or there is one window
    only, all layers form a single group, an empty one if none is paged; it slides if they all have that window.
    """
    paged = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, LayerGeometry)]
    kinds: dict[tuple[int, bool], list[int]] = {}
    for index, layer in paged:
        kinds.setdefault((layer.window, layer.chunked), []).append(index)
    if len({layer[:3] for _, layer in paged}) > 1 or len(kinds) <= 1:
        window, chunked = min(kinds) if len(kinds) == 1 else (0, False)
        return [Group(window, [index for index, _ in paged], chunked)]
    size = min(len(indices) for indices in kinds.values())
    return [
        Group(window, indices[start : start + size], chunked)
        for (window, chunked), indices in sorted(kinds.items())
        for start in range(0, len(indices), size)
    ]


class OwnLayer(NamedTuple):
    """Transformers' own layer, made anew for every cache: in the place of one that is not paged, or beside one that is."""

    name: str
    make: Callable[[], Any]

    def __repr__(self) -> str:
        return self.name


def layers_of(model: Any) -> list[LayerGeometry | OwnLayer]:
    """What each layer of `model` needs in a cache.

    The kinds come from the config, as transformers itself reads it, and the geometry from one token that runs through the
    model: no config tells it for every architecture (latent attention, heads that differ from layer to layer, layers that
    share their keys). Where the model cannot be run like that, the config has to do; raises `ValueError` where that names
    layers whose shape it does not tell, and for a model whose states no `Cache` of this release holds.
    """
    if makes_own_cache(model):
        raise ValueError(
            f"{type(model).__name__} has convolution or recurrent states, and this release of transformers keeps them in a "
            "cache of the model's own: use transformers 5.10 or newer"
        )
    try:
        cache = measure(model)
    except (MemoryError, torch.OutOfMemoryError):  # says nothing about the model
        raise
    except Exception as error:
        logger.info("%s does not run on one token (%s): its config must tell the geometry", type(model).__name__, error)
        return list(geometry_of(model.config))
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    chunked = [index for index, layer_type in enumerate(types) if layer_type == "chunked_attention"]
    fresh = DynamicCache(config=model.config).layers
    layers: list[LayerGeometry | OwnLayer] = []
    # One mask serves all layers that slide, and one of ours is as wide as the sequence: all of them are paged, or none.
    own_slide = any(getattr(layer, "is_sliding", False) and not _is_paged(layer) for layer in cache.layers)
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        paged = _is_paged(layer) and not (own_slide and layer.is_sliding)
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and (paged or _grows_beside(layer)):
            states = getattr(layer, "number_of_states", 0)
            window = getattr(layer, "sliding_window", None) or 0
            beside = None if paged else _own(layer, fresh[index])
            shape = keys.shape[1], keys.shape[3], values.shape[3]
            layers.append(LayerGeometry(*shape, states, int(window), beside, index in chunked))
        else:
            layers.append(_own(layer, fresh[index]))
    return layers


def _own(layer: Any, fresh: Any) -> OwnLayer:
    return OwnLayer(type(layer).__name__, functools.partial(copy.deepcopy, fresh))


def _is_paged(layer: Any) -> bool:
    return type(layer) in PAGED_LAYERS or (HAS_HYBRID_LAYERS and type(layer).__name__ in HYBRID_LAYERS)


def _grows_beside(layer: Any) -> bool:
    """Whether this is a plain layer of keys and values that keeps something more beside them."""
    kept = ("update", "lazy_initialization", "get_mask_sizes", "get_seq_length")
    return isinstance(layer, DynamicLayer) and all(getattr(type(layer), n) is getattr(DynamicLayer, n) for n in kept)


@torch.no_grad()
def measure(model: Any) -> Any:
    """The default cache of `model` after one token; of an encoder-decoder model, the decoder's own. Draws no random numbers
    from those of the caller, also where dropout is in force."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        return _one_token(model)


def _one_token(model: Any) -> Any:
    cache = DynamicCache(config=model.config)
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    if not model.config.is_encoder_decoder:
        model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=True, **{CACHE_NAME: cache})
        return cache
    encoded = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=model.device)
    both = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    inputs = dict(encoder_outputs=BaseModelOutput(last_hidden_state=encoded), decoder_input_ids=token)
    model(**inputs, use_cache=True, **{CACHE_NAME: both})
    return cache


def makes_sliding_masks(model: Any) -> bool:
    """Whether the code of `model` asks for masks that slide. Some models have a window in their config, and so in their
    cache, but not in their masks."""
    for module in {type(part).__module__ for part in model.modules()}:
        try:
            source = inspect.getsource(sys.modules[module])
        except (KeyError, OSError, TypeError):
            continue
        if any(name in source for name in SLIDING_MASKS):
            return True
    return False


def needs_of(model: Any) -> set[str]:
    """What the attention of `model` asks of a kernel beyond plain causality and windows, of `hf_paged.kernels.FEATURES`."""
    modules = list(model.modules()) if hasattr(model, "modules") else []
    config = model.config.get_text_config(decoder=True)
    needs = set()
    if any(getattr(module, "sinks", None) is not None for module in modules):
        needs.add(SINKS)
    if getattr(config, "attn_logit_softcapping", None):
        needs.add(SOFTCAP)
    return needs


def geometry_of(config: Any) -> list[LayerGeometry]:
    """Geometry of every layer, from a transformers config (the text part of a composite one) alone."""
    config = config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    unknown = sorted(set(types) - set(PAGED_TYPES))
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of type {', '.join(unknown)}, which keep other state than keys and values; "
            f"hf_paged pages {', '.join(PAGED_TYPES)}"
        )
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not heads or not kv_heads:
        raise ValueError(
            f"{type(config).__name__} names no attention heads, so there is nothing to page; if the model has keys and "
            "values all the same, make the pool with PagePool([LayerGeometry(...), ...], num_blocks=...)"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [LayerGeometry(kv_heads, head_dim, head_dim)] * layers
