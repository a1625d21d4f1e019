"""Models in which only some layers have plain keys and values: those are paged, and the rows of all move together."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from tiny import CACHE, COMMON, GQA, SIZE, condition, default, make_pool, paged, prompts
from transformers import AutoModelForCausalLM, FalconH1Config, GptOssConfig, Qwen3NextConfig

from hf_paged import PagedCache, PagePool
from hf_paged.compat import RELEASE
from hf_paged.lazy import LazyKV

SIZES = [4, 16, 256]
LINEAR: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16
)
CONFIGS = {
    "alternating": lambda: Qwen3NextConfig(
        **{**SIZE, "num_hidden_layers": 4},
        **GQA,
        **COMMON,
        **LINEAR,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "both in one layer": lambda: FalconH1Config(
        **SIZE, **GQA, **COMMON, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8
    ),
}
REFUSED = RELEASE < (5, 10)
needs_states = pytest.mark.skipif(
    REFUSED,
    reason="no Cache of this release holds states, each such model has a cache of its own; see test_refused_by_name",
)


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    model = condition(AutoModelForCausalLM.from_config(CONFIGS[request.param]()), 2)
    model.set_attn_implementation("paged")
    return model


def states(cache: PagedCache) -> list[torch.Tensor]:
    """All convolution and recurrent states, each [B, ...]."""
    found = []
    for layer in cache.layers:
        for kind in ("conv_states", "recurrent_states"):
            kept = getattr(layer, kind, {})
            found += kept.values() if isinstance(kept, dict) else [kept]  # older releases have one per layer
    return [state.clone() for state in found if state is not None]


def keys_of(cache: PagedCache) -> list[torch.Tensor]:
    """The keys of all layers that have some, paged or not, each [B, H, S, D]."""
    found = [keys for keys, _ in cache if keys is not None]
    return [keys.dense() if isinstance(keys, LazyKV) else keys.clone() for keys in found]


@needs_states
@pytest.mark.parametrize("block_size", SIZES)
def test_tokens(block_size: int, model: Any) -> None:
    inputs = prompts([16, 21, 10])
    for flags in ({}, dict(num_beams=4), dict(do_sample=True, num_return_sequences=3)):
        want = default(model, inputs, max_new_tokens=12, **flags)
        assert torch.equal(want, paged(model, inputs, make_pool(model, 300, block_size), max_new_tokens=12, **flags))
        assert want[:, 21:].unique().numel() > 5, "the tokens are degenerate and prove nothing"


@needs_states
def test_rows_of_both_kinds_move_together(model: Any) -> None:
    """Keys and states follow a reorder, a fork and a repetition alike, and the states of a fork are its own."""
    with PagedCache(make_pool(model)) as cache, torch.no_grad():
        model(**prompts([9, 9, 9]), **{CACHE: cache})
        keys, old = keys_of(cache), states(cache)
        assert len(old) >= 4
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        for before, after in zip(old, states(cache), strict=True):
            assert torch.equal(before[[2, 0, 0]], after)
        for before, after in zip(keys, keys_of(cache), strict=True):
            assert torch.equal(before[[2, 0, 0]], after)
        with cache.fork(2) as twin:
            model(torch.full((6, 1), 7), **{CACHE: twin})
            for before, after, moved in zip(old, states(cache), states(twin), strict=True):
                assert torch.equal(before[[2, 0, 0]], after), "the fork has written into the original"
                assert not torch.equal(after.repeat_interleave(2, 0), moved)


@pytest.mark.skipif(not REFUSED, reason="these states are part of a Cache here")
def test_refused_by_name(model: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"{type(model).__name__} has convolution or recurrent states.*5\.10 or newer"
    ):
        PagePool.for_model(model, num_blocks=4)


@pytest.mark.parametrize("block_size", SIZES)
def test_sinks(block_size: int) -> None:
    """gpt-oss in miniature: sinks, and windows in every other layer."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(
        GptOssConfig(**SIZE, **GQA, **COMMON, **experts, sliding_window=8, layer_types=types)
    )
    model = condition(model, 2)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.copy_(torch.tensor([3.0, -2.0, 1.0, 2.0]))
    inputs = prompts([16, 21, 10])
    want = default(model, inputs, "eager", max_new_tokens=20)
    model.set_attn_implementation("paged")
    assert torch.equal(want, paged(model, inputs, make_pool(model, 300, block_size), max_new_tokens=20))
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert not torch.equal(want, default(model, inputs, "eager", max_new_tokens=20)), "the sinks make no difference"


@pytest.mark.parametrize("block_size", SIZES)
def test_softcap(block_size: int) -> None:
    model, inputs = tiny.build("gemma2"), prompts([16, 21, 10])

    def cap(value: float | None) -> Any:
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = value
        return default(model, inputs, "eager", max_new_tokens=20)

    without, want = cap(None), cap(2.0)
    assert torch.equal(want, paged(model, inputs, make_pool(model, 300, block_size), max_new_tokens=20))
    assert not torch.equal(want, without), "the softcap makes no difference"
