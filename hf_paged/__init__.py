"""hf_paged: a paged key/value cache for Hugging Face transformers' `generate`.

Importing it registers `attn_implementation="paged"` and applies the patches (`HF_PAGED_PATCHES=0` turns those off).
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .attention import paged_attention
from .blocks import IntegrityError, PoolExhausted
from .cache import PagedCache
from .enable import Enabled, enable
from .encoder_decoder import PagedEncoderDecoderCache
from .layout import LayerGeometry, OwnLayer
from .masks import paged_mask
from .patches import apply as _apply_patches
from .pool import PagePool, PoolStats

__version__ = "0.1.0"
__all__ = [
    "Enabled",
    "IntegrityError",
    "LayerGeometry",
    "OwnLayer",
    "PagePool",
    "PagedCache",
    "PagedEncoderDecoderCache",
    "PoolExhausted",
    "PoolStats",
    "enable",
]

AttentionInterface.register("paged", paged_attention)
# The mask function talks to a cache, and Dynamo stumbles over what it is given.
AttentionMaskInterface.register("paged", torch.compiler.disable(paged_mask))  # type: ignore[no-untyped-call]
_apply_patches()
