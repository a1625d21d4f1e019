"""Tiny random models, and pools whose unused slots hold NaN."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.compat import CACHE_NAME as CACHE
from hf_paged.compat import RELEASE
from hf_paged.kernels import BACKENDS
from hf_paged.layout import makes_sliding_masks

VOCAB, PAD = 160, 0
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, pad_token_id=PAD, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False
)
SIZE: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
GQA: dict[str, Any] = dict(num_key_value_heads=2, head_dim=16)
SLIDING_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
FULL_SLIDING = ["full_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZE, **GQA, **COMMON),
    "qwen2": lambda: Qwen2Config(**SIZE, num_key_value_heads=2, **COMMON),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=2048, **COMMON),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZE, **COMMON),
    "mistral": lambda: MistralConfig(**SIZE, **GQA, sliding_window=8, **COMMON),
    "gemma2": lambda: Gemma2Config(**SIZE, **GQA, sliding_window=8, layer_types=SLIDING_FULL, **COMMON),
    "gemma3": lambda: Gemma3TextConfig(**SIZE, **GQA, sliding_window=8, layer_types=FULL_SLIDING, **COMMON),
}


def build(kind: str, attn: str = "paged", seed: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A model of three layers whose random weights are large enough that tokens depend on the context."""
    model = condition(AutoModelForCausalLM.from_config(CONFIGS[kind]()), seed)
    model.set_attn_implementation(attn)
    return model.to(dtype)


@torch.no_grad()
def condition(model: Any, seed: int) -> Any:
    """Draw the weights of any model anew, and let it never end by itself."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(noise * 0.1)
    model.generation_config.eos_token_id = None
    return model.eval()


def poison(pool: PagePool) -> PagePool:
    """Allocate all storage and fill every slot with NaN, unless the kernel asks for zeros."""
    for layer, geometry in enumerate(pool.layers):
        if not isinstance(geometry, LayerGeometry):
            continue
        heads, key_dim, value_dim = geometry[:3]
        keys = torch.empty(1, heads, 0, key_dim, dtype=pool.dtype, device=pool.device)
        values = torch.empty(1, heads, 0, value_dim, dtype=pool.dtype, device=pool.device)
        for tensor in pool.storage_for(layer, keys, values)[:2]:
            if not BACKENDS[pool.kernel].needs_zeroed_frames:
                tensor.fill_(float("nan"))
    return pool


def make_pool(model: Any, num_blocks: int = 400, block_size: int = 4, **kwargs: Any) -> PagePool:
    return poison(PagePool.for_model(model, num_blocks=num_blocks, block_size=block_size, **kwargs))


def prompts(lengths: list[int], seed: int = 0, width: int | None = None) -> dict[str, torch.Tensor]:
    """Random left-padded prompts of these lengths: input_ids and attention_mask [B, width]."""
    generator = torch.Generator().manual_seed(seed)
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if length:
            ids[row, -length:] = torch.randint(3, VOCAB, (length,), generator=generator)
            mask[row, -length:] = 1
    return dict(input_ids=ids, attention_mask=mask)


@contextlib.contextmanager
def shapes_of(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """Record the shape of the token ids of every forward pass, without a hook, which would keep rows from being shared."""
    shapes: list[tuple[int, ...]] = []
    embedding = model.get_input_embeddings()
    forward = embedding.forward

    def spy(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return forward(ids, *args, **kwargs)

    embedding.forward = spy
    try:
        yield shapes
    finally:
        del embedding.forward


# What a release cannot do with its own cache: the first release that can, where it fails, the error, and what it is.
LIMITS = [
    ((5, 10), "_prefill", "Cannot use prefill chunking without a cache", "chunks"),
    ((5, 10), "generate", "index -1 is out of bounds", "new ids alone, on a filled cache"),
    ((5, 10), "get_candidates", "missing 1 required positional argument", "drafts of a model's first layers"),
    ((5, 10), "_assisted_decoding", "Cannot `crop` a `DynamicSlidingWindowLayer`", "rollback past a window"),
    ((5, 24), "_assisted_decoding", r"The size of tensor a .* tensor b .* dimension 3", "drafts past a window"),
]

# Whether positions are known before the prefill. Where they are not, ragged prompts run padded, and share no prefixes.
KNOWS_POSITIONS = RELEASE >= (5, 10)


@contextlib.contextmanager
def upstream() -> Iterator[None]:
    """What transformers does without hf_paged. Where a known limit of an older release stops it, the test is skipped."""
    try:
        yield
    except Exception as error:
        places = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        for release, place, message, what in LIMITS:
            if release > RELEASE and place in places and re.search(message, str(error)):
                pytest.skip(f"{what}: the default cache of this release fails with {type(error).__name__}: {message}")
        raise


def default(model: Any, inputs: dict[str, torch.Tensor], attn: str = "sdpa", seed: int = 0, **kwargs: Any) -> Any:
    """`generate` with the default cache; the model's attention implementation is put back afterwards."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attn)
    if RELEASE < (5, 10) and "prefill_chunk_size" in kwargs:
        cache = DynamicCache(config=model.config)
        if any(cache.is_sliding) and makes_sliding_masks(model):
            # It counts one position too many after the chunks, so its windows end one token early: see `after_chunks`.
            del kwargs["prefill_chunk_size"]
        else:
            kwargs[CACHE] = cache  # it makes none for chunks
    try:
        torch.manual_seed(seed)
        with upstream():
            return model.generate(**inputs, **kwargs)
    finally:
        model.set_attn_implementation(before)


def paged(model: Any, inputs: dict[str, torch.Tensor], pool: PagePool, seed: int = 0, **kwargs: Any) -> Any:
    """`generate` with a fresh PagedCache, released afterwards; blocks and bookkeeping are checked."""
    used = pool.stats().used
    with PagedCache(pool) as cache:
        torch.manual_seed(seed)
        out = model.generate(**inputs, **{CACHE: cache}, **kwargs)
        pool.check_integrity()
    assert pool.stats().used == used, "blocks were lost"
    return out
