"""The "paged" attention and mask functions: native where the pattern is known, exact where not, sdpa without a cache."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CACHE, make_pool, poison, prompts
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GptOssConfig, LlamaConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)

from hf_paged import LayerGeometry, PagedCache, PagePool
from hf_paged.attention import paged_attention
from hf_paged.lazy import LazyMask
from hf_paged.masks import chunk_of, window_of


def test_registered_at_import() -> None:
    assert "paged" in AttentionInterface().valid_keys()
    assert "paged" in AttentionMaskInterface().valid_keys()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_training_without_a_paged_cache_equals_sdpa(kind: str, model_of: Callable[[str], Any]) -> None:
    model, inputs = model_of(kind), prompts([16, 21])
    gradients = {}
    for attn in ("paged", "sdpa"):
        model.set_attn_implementation(attn)
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        gradients[attn] = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    assert len(gradients["paged"]) > 10
    for ours, theirs in zip(gradients["paged"], gradients["sdpa"], strict=True):
        assert torch.equal(ours, theirs)


def test_keys_that_require_grad_are_refused(llama: Any) -> None:
    pool = make_pool(llama)
    with PagedCache(pool) as cache:
        with pytest.raises(RuntimeError, match=r"for inference.*torch\.no_grad"):
            llama(**prompts([5]), **{CACHE: cache})
        assert pool.stats().used == 0


def test_inference_mode_and_no_grad_mix(llama: Any) -> None:
    pool = make_pool(llama, 20)
    inputs = prompts([5])
    with PagedCache(pool) as cache:
        with torch.inference_mode():
            llama(**inputs, **{CACHE: cache})
        with torch.no_grad():
            llama(torch.tensor([[7]]), **{CACHE: cache})
        assert cache.lengths == [6]


def test_patterns() -> None:
    assert window_of(causal_mask_function) == 0
    assert window_of(sliding_window_causal_mask_function(7)) == 7
    assert window_of(chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))) is None
    assert chunk_of(chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))) == 8
    assert chunk_of(causal_mask_function) == chunk_of(sliding_window_causal_mask_function(7)) == 0
    assert window_of(or_masks(causal_mask_function, causal_mask_function)) is None
    assert window_of(and_masks(causal_mask_function, causal_mask_function)) is None
    assert window_of(and_masks(sliding_window_causal_mask_function(7), causal_mask_function)) is None
    assert window_of(lambda b, h, q, k: k <= q) is None


class Layer:
    """A cache of one layer in lockstep with dense keys and values."""

    def __init__(self, past: int, q_length: int, heads: int = 2, dim: int = 8):
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, 2, 2, past + q_length, dim, generator=generator).unbind(0)
        self.query = torch.randn(2, 2 * heads, q_length, dim, generator=generator)
        self.config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
        self.config._attn_implementation = "paged"
        self.module = types.SimpleNamespace(is_causal=True, num_key_value_groups=heads, training=False)
        self.cache = PagedCache(poison(PagePool([LayerGeometry(2, dim, dim)], num_blocks=40, block_size=4)))
        if past:
            self.cache.update(self.keys[:, :, :past], self.values[:, :, :past], 0)
        self.past = past

    def mask(self, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        embeds = torch.empty(2, self.query.shape[2], 4)
        arguments = dict(kwargs, config=self.config, attention_mask=attention_mask)
        arguments |= {
            "inputs_embeds": embeds,
            "input_embeds": embeds,
            "cache": self.cache,
            "past_key_values": self.cache,
        }
        arguments["cache_position"] = torch.arange(self.query.shape[2]) + self.past
        known = inspect.signature(inspect.unwrap(create_causal_mask)).parameters
        kwargs = {name: value for name, value in arguments.items() if name in known}
        missing = {name: None for name, parameter in known.items() if parameter.default is parameter.empty} | kwargs
        return inspect.unwrap(create_causal_mask)(**missing)

    def run(self, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        handles = self.cache.update(self.keys[:, :, self.past :], self.values[:, :, self.past :], 0)
        out = paged_attention(self.module, self.query, *handles, mask, **kwargs)  # type: ignore[arg-type]
        assert handles[0]._dense is None or kwargs or not isinstance(mask, LazyMask) or mask.window is None
        return out

    def expected(self, visible: torch.Tensor, softcap: float = 0, sinks: Any = None, bias: Any = 0) -> torch.Tensor:
        keys, values = (x.repeat_interleave(2, 1) for x in (self.keys, self.values))
        scores = self.query @ keys.transpose(2, 3) * 8**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = (scores + bias).masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sinks = sinks if sinks.dim() == 4 else sinks.view(1, -1, 1, 1).expand(2, -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., : keys.shape[2]] @ values).transpose(1, 2)


def causal(q_length: int, width: int) -> torch.Tensor:
    return torch.arange(width) <= torch.arange(width - q_length, width)[:, None]


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("q_length", [1, 4])
def test_native_path_never_gathers(past: int, q_length: int) -> None:
    layer = Layer(past, q_length)
    mask = layer.mask()
    out, weights = layer.run(mask)
    assert mask._dense is None and weights is None
    torch.testing.assert_close(out, layer.expected(causal(q_length, past + q_length)))


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("q_length", [1, 4])
def test_no_mask_means_causal_without_padding(past: int, q_length: int) -> None:
    layer = Layer(past, q_length)
    torch.testing.assert_close(layer.run(None)[0], layer.expected(causal(q_length, past + q_length)))


def test_no_mask_and_not_causal_sees_everything() -> None:
    layer = Layer(3, 4)
    torch.testing.assert_close(layer.run(None, is_causal=False)[0], layer.expected(torch.ones(4, 7).bool()))


def test_unknown_pattern_takes_the_exact_mask() -> None:
    layer = Layer(3, 4)
    mask = layer.mask(or_mask_function=lambda b, h, q, k: (k == 5) & (q >= 0))
    visible = causal(4, 7)
    visible[:, 5] = True
    torch.testing.assert_close(layer.run(mask)[0], layer.expected(visible))


def test_a_touched_mask_still_counts() -> None:
    """A model that slices or adds to the mask gets a plain tensor, which is honoured."""
    layer = Layer(3, 4)
    visible = causal(4, 7)
    visible[:, 1] = False
    mask = layer.mask() & (torch.arange(7) != 1)
    assert not isinstance(mask, LazyMask)
    torch.testing.assert_close(layer.run(mask)[0], layer.expected(visible))


@pytest.mark.parametrize("pads", [False, True])
def test_features_native_and_dense(pads: bool) -> None:
    """Softcap, sinks and their mix are exact on both paths; position bias and weights on the dense one."""
    sinks, bias = torch.randn(4), torch.randn(1, 4, 4, 7)
    mask_2d = torch.ones(2, 7).bool()
    visible = causal(4, 7)[None, None].expand(2, 1, 4, 7).clone()
    if pads:
        mask_2d[1, :2] = False
        visible[1, :, :, :2] = False
    for kwargs, oracle in (
        (dict(softcap=1.5), dict(softcap=1.5)),
        (dict(s_aux=sinks), dict(sinks=sinks)),
        (dict(s_aux=sinks.bfloat16()), dict(sinks=sinks.bfloat16())),
        (dict(softcap=1.5, s_aux=sinks), dict(softcap=1.5, sinks=sinks)),
        (dict(position_bias=bias), dict(bias=bias)),
        (dict(position_bias=bias, softcap=2.0), dict(bias=bias, softcap=2.0)),
    ):
        for native in (True, False):
            layer = Layer(3 if not pads else 0, 4 if not pads else 7)
            query, expected = layer.query[:, :, -4:], None
            if pads:  # one pass over all 7 positions, of which the last 4 are compared
                oracle_layer = Layer(0, 7)
                oracle_layer.query = query
                expected = oracle_layer.expected(visible, **oracle)
                bias_kwargs = (
                    {"position_bias": torch.cat([bias[:, :, :3], bias], 2)} if "position_bias" in kwargs else {}
                )
            else:
                expected, bias_kwargs = layer.expected(visible, **oracle), {}
            mask: Any = layer.mask(mask_2d)
            out, _ = layer.run(mask if native else mask.dense(), **{**kwargs, **bias_kwargs})
            torch.testing.assert_close(out[:, -4:], expected, msg=f"{list(kwargs)} native={native}")


@pytest.mark.parametrize("with_mask", [False, True])
def test_features_dense_only(with_mask: bool) -> None:
    """One sink per query, as inkling2 computes them, and all features for keys that come from no PagedCache."""
    sinks, visible = torch.randn(2, 4, 4, 1), causal(4, 7)
    layer = Layer(3, 4)
    out, _ = layer.run(layer.mask() if with_mask else None, sinks=sinks)
    torch.testing.assert_close(out, layer.expected(visible, sinks=sinks))
    for kwargs, oracle in (
        (dict(sinks=sinks), dict(sinks=sinks)),
        (dict(s_aux=sinks[0, :, 0, 0]), dict(sinks=sinks[0, :, 0, 0])),
        (dict(softcap=1.5), dict(softcap=1.5)),
    ):
        mask = visible[None, None] if with_mask else None
        out, _ = paged_attention(layer.module, layer.query, layer.keys, layer.values, mask, **kwargs)  # type: ignore
        torch.testing.assert_close(out, layer.expected(visible, **oracle))


@pytest.mark.parametrize("pads", [False, True])
def test_models_that_add_their_masks(pads: bool) -> None:
    """A model that was never made for sdpa gets an additive mask, of which the pattern is recognised all the same."""
    layer = Layer(0, 5)
    layer.config = GptOssConfig(num_attention_heads=4, num_key_value_heads=2)
    layer.config._attn_implementation = "paged"
    mask_2d = torch.ones(2, 5).bool()
    mask_2d[1, :2] = not pads
    mask = layer.mask(mask_2d)
    assert (mask.dtype, mask.window, mask._dense) == (torch.float32, 0, None)
    layer.config._attn_implementation = "eager"
    assert torch.equal(mask + 0, layer.mask(mask_2d))
    layer.cache = DynamicCache()  # type: ignore[assignment]
    layer.config._attn_implementation = "paged"
    assert torch.equal(layer.mask(mask_2d), mask.dense())


@pytest.mark.parametrize("with_mask", [False, True])
def test_chosen_indices(with_mask: bool) -> None:
    """Sparse attention names the keys that each query may see."""
    layer = Layer(3, 4)
    indices = torch.tensor([[[0, 2], [1, 4], [5, 0], [6, 3]], [[3, 1], [2, 6], [0, 1], [4, 5]]])
    visible = torch.zeros(2, 1, 4, 7).bool().scatter_(-1, indices[:, None], True) & causal(4, 7)
    out, _ = layer.run(layer.mask() if with_mask else None, indices=indices)
    torch.testing.assert_close(out, layer.expected(visible))


def test_output_attentions_returns_weights() -> None:
    layer = Layer(3, 4)
    out, weights = layer.run(layer.mask(), output_attentions=True)
    assert weights is not None and weights.shape == (2, 4, 4, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 4))
    torch.testing.assert_close(out, layer.expected(causal(4, 7)))


def test_mask_of_an_ordinary_cache_is_sdpas(llama: Any) -> None:
    """Under "paged" with another cache, nothing is lazy."""
    inputs = prompts([5, 9])
    with torch.no_grad():
        ours = llama(**inputs, use_cache=True).logits
        llama.set_attn_implementation("sdpa")
        assert torch.equal(ours, llama(**inputs, use_cache=True).logits)
