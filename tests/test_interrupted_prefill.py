"""A prefill that is interrupted leaves nothing behind that a later call with the same cache would believe."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_hybrids import needs_states
from test_own_layers import built
from tiny import CACHE, VOCAB, condition, default, make_pool
from transformers import AutoModelForSeq2SeqLM, BartConfig

from hf_paged import PagedCache, PagedEncoderDecoderCache


def random_ids(seed: int) -> dict[str, torch.Tensor]:
    return dict(input_ids=torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(seed)))


def generate_interrupted(model: Any, layer: torch.nn.Module, inputs: Any, cache: PagedCache) -> None:
    def interrupt(module: Any, args: Any) -> None:
        raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, max_new_tokens=4, **{CACHE: cache})
    hook.remove()


def test_another_source() -> None:
    sizes = dict(d_model=64, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2, forced_eos_token_id=None)
    config = BartConfig(vocab_size=VOCAB, encoder_ffn_dim=96, decoder_ffn_dim=96, **sizes, **tokens)
    model = condition(AutoModelForSeq2SeqLM.from_config(config), 2)
    want = default(model, random_ids(2), max_new_tokens=9)
    assert not torch.equal(want, default(model, random_ids(1), max_new_tokens=9))
    model.set_attn_implementation("paged")
    pool = make_pool(model)
    with PagedCache(pool) as cache:
        generate_interrupted(model, model.model.decoder.layers[2], random_ids(1), cache)
        assert pool.stats().used == 0
        assert torch.equal(want, model.generate(**random_ids(2), max_new_tokens=9, **{CACHE: cache}))


@needs_states
@pytest.mark.parametrize("kind", ["jamba", "mamba"])
def test_another_prompt(kind: str) -> None:
    """Of layers that are paged and others, and of others only."""
    model = built(kind)
    if CACHE not in inspect.signature(model.forward).parameters:
        pytest.skip(f"{kind} of this release takes its cache under a name of its own")
    own = model.config._attn_implementation
    flags = dict(max_new_tokens=9, eos_token_id=None)
    want = default(model, random_ids(2), own, **flags)
    model.set_attn_implementation("paged")
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    with PagedCache(make_pool(model)) as cache:
        generate_interrupted(model, layers[-1], random_ids(1), cache)
        assert torch.equal(want, model.generate(**random_ids(2), **flags, **{CACHE: cache}))
    model.set_attn_implementation(own)


@needs_states
def test_nothing_is_compiled() -> None:
    """transformers compiles, on GPUs, the forward pass of every cache that says it can be."""
    for kind in ("mamba", "jamba"):
        cache = PagedCache(make_pool(built(kind)))
        assert not cache.is_compileable and not PagedEncoderDecoderCache(cache).is_compileable
