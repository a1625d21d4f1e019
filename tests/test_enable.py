"""`enable`: whose caches and whose attention it exchanges, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from enabling import Spy, enabled, generate, untouched
from test_padding import kernel_calls
from tiny import CACHE, prompts
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.generation import GenerationMixin

import hf_paged
from hf_paged import LayerGeometry, PagedCache, PagePool

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def llama(model_of: Callable[[str], Any]) -> Iterator[Any]:
    with untouched(model_of("llama")) as model:
        yield model


# ------------------------------------------------------------------------------------------------- whose cache, whose attention


OTHERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "no cache": lambda model: dict(use_cache=False),
    "a dynamic cache": lambda model: {CACHE: DynamicCache(config=model.config)},
    "by name": lambda model: dict(cache_implementation="dynamic"),
    "static": lambda model: dict(cache_implementation="static"),
    "by generation config": lambda model: dict(
        generation_config=GenerationConfig(cache_implementation="static", max_new_tokens=12, pad_token_id=0),
        max_new_tokens=None,
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_caller_asks_for_is_left_alone(kind: str) -> None:
    llama = tiny.build("llama", "sdpa")  # some of this leaves traces on a model
    want = generate(llama, prompts([9, 5]), **OTHERS[kind](llama))
    with enabled(llama) as handle, Spy(llama) as spy:
        assert torch.equal(want, generate(llama, prompts([9, 5]), **OTHERS[kind](llama)))
    assert set(spy.attention) == {"sdpa"} and PagedCache not in spy.caches and handle.pool.stats().peak_used == 0


def test_a_paged_cache_of_the_caller_is_used_and_kept(llama: Any) -> None:
    pool = tiny.make_pool(llama)
    with enabled(llama) as handle, Spy(llama) as spy, PagedCache(pool) as cache:
        want = tiny.default(llama, prompts([9, 5]), max_new_tokens=12, cache_implementation="dynamic")
        spy.attention.clear()
        assert torch.equal(want, generate(llama, prompts([9, 5]), **{CACHE: cache}))
        assert set(spy.attention) == {"paged"} and handle.pool.stats().peak_used == 0
        assert cache.lengths == [20, 16]


@pytest.mark.parametrize(("kind", "attention"), [("gemma2", "eager"), ("llama", "sdpa"), ("llama", "paged")])
def test_forward_passes_outside_of_generate_are_the_models_own(
    kind: str, attention: str, model_of: Callable[[str], Any]
) -> None:
    """gemma2 caps its scores, which sdpa refuses to do."""
    model, ids = model_of(kind), prompts([20])["input_ids"]
    model.set_attn_implementation(attention)

    def train() -> list[Any]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    want = train()
    with enabled(model), Spy(model) as spy:
        generate(model, prompts([20, 9]))
        assert set(spy.attention) == {"paged"} and set(spy.caches) == {PagedCache}
        spy.attention.clear()
        assert all(torch.equal(a, b) for a, b in zip(want, train(), strict=True))
        assert spy.attention == [attention] == [model.config._attn_implementation]


def test_attention_weights_in_the_output() -> None:
    """Only eager attention returns them, so it stays, and reads the blocks through the dense view."""
    llama = tiny.build("llama", "eager")
    flags = dict(output_attentions=True, return_dict_in_generate=True)
    want = generate(llama, prompts([9]), **flags)
    with enabled(llama) as handle, Spy(llama) as spy:
        got = generate(llama, prompts([9]), **flags)
        assert handle.pool.stats().peak_used > 0 and set(spy.attention) == {"eager"}
    for a, b in zip(want.attentions, got.attentions, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


def test_only_the_decoder_of_a_composite_model_is_switched(no_gc: None) -> None:
    vision = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = dict(model_type="llama", **tiny.SIZE, **tiny.GQA, vocab_size=tiny.VOCAB)
    token = dict(image_token_id=7, vision_feature_layer=-1, vision_feature_select_strategy="full")
    config = LlavaConfig(vision_config=dict(model_type="siglip_vision_model", **vision), text_config=text, **token)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    ids = prompts([12, 12])["input_ids"]
    ids[ids == 7] = 8
    ids[:, 2:6] = 7
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(2, 3, 8, 8))
    vision_seen: list[str] = []  # by the model, whose images may be encoded before the cache is made
    model.register_forward_pre_hook(lambda m, args: vision_seen.append(m.config.vision_config._attn_implementation))
    model.set_attn_implementation({"": "sdpa", "vision_config": "eager", "text_config": "sdpa"})
    want = generate(model, inputs, num_beams=2)
    with untouched(model, {}):
        with enabled(model) as handle, Spy(model) as spy, kernel_calls(handle.pool) as calls:
            assert torch.equal(want, generate(model, inputs, num_beams=2))
        assert calls and set(spy.attention) == {"paged"} and set(vision_seen) == {"eager"}
        assert handle.pool.stats().used == 0


# -------------------------------------------------------------------------------------------------------- on and off


def serves(model: Any, handle: Any) -> bool:
    """Whether a call of `generate` draws on the pool of this handle."""
    with kernel_calls(handle.pool) as calls, Spy(model) as spy:
        used = []
        hook = model.register_forward_hook(lambda m, args, out: used.append(handle.pool.stats().used))
        generate(model, prompts([9]), max_new_tokens=2)
        hook.remove()
    assert bool(calls) == (PagedCache in spy.caches)
    return max(used) > 0


def test_nested_and_disabled_in_any_order(llama: Any) -> None:
    other = tiny.build("gpt2", "eager")
    first, second, third = enabled(llama), enabled(llama), enabled(other)
    assert (serves(llama, first), serves(llama, second), serves(other, third)) == (False, True, True)
    first.disable()
    assert serves(llama, second)
    with enabled(llama) as fourth:
        assert serves(llama, fourth)
        second.disable()
        second.disable()
        assert serves(llama, fourth)
    with pytest.raises(RuntimeError, match="was disabled: call"), second:
        pass
    assert "disabled" in repr(second) and "gpt2" in repr(third).lower()
    for handle in (first, second, fourth):
        assert not serves(llama, handle)
    assert serves(other, third)
    third.disable()
    assert not serves(other, third) and other.config._attn_implementation == "eager"


def test_a_call_under_way_ends_as_it_began(llama: Any) -> None:
    """Two models that share a config, one generating inside a callback of the other, which is disabled meanwhile."""
    twin = LlamaForCausalLM(llama.config).eval()
    twin.load_state_dict(llama.state_dict())
    twin.generation_config.eos_token_id = None
    handle, seen = enabled(llama), []

    def callback(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == 12:
            with enabled(twin):
                seen.append(generate(twin, prompts([9])))
            seen.append(llama.config._attn_implementation)
            handle.disable()
        return scores

    want = tiny.default(llama, prompts([9]), max_new_tokens=12)
    assert torch.equal(want, generate(llama, prompts([9]), logits_processor=[callback]))
    assert torch.equal(want, seen[0]) and seen[1] == "paged" and handle.pool.stats().used == 0


def test_a_copy_is_not_enabled(llama: Any) -> None:
    """It has weights of its own, and nothing in it that would lead to the original."""
    with enabled(llama) as handle:
        twin = copy.deepcopy(llama)
        torch.nn.init.normal_(twin.lm_head.weight, generator=torch.Generator().manual_seed(0))
        want = tiny.default(twin, prompts([9]), max_new_tokens=12)
        assert torch.equal(want, generate(twin, prompts([9]))) and handle.pool.stats().peak_used == 0
        assert not torch.equal(want, generate(llama, prompts([9])))


def test_an_enabled_model_dies_like_any_other(no_gc: None) -> None:
    model = tiny.build("llama", "sdpa")
    handle = enabled(model)
    generate(model, prompts([9]))
    alive = weakref.ref(model.lm_head)
    model = None
    gc.collect()
    assert alive() is None
    handle.disable()


def test_a_model_that_changed_its_dtype_gets_another_pool() -> None:
    model = tiny.build("llama", "sdpa")
    with enabled(model) as handle:
        before = handle.pool
        generate(model, prompts([9]))
        assert handle.pool is before
        model.to(torch.bfloat16)
        generate(model, prompts([9]))
        assert handle.pool.dtype == torch.bfloat16 and handle.pool.num_blocks == before.num_blocks
    with pytest.raises(
        ValueError, match=r"another model, LlamaForCausalLM has torch\.bfloat16 weights.*torch\.float32"
    ):
        hf_paged.enable(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_inside_the_forward_pass(dtype: torch.dtype, llama: Any) -> None:
    """As trainers do it: RoPE makes the keys float32, the values are bfloat16. Attention takes both in the pool's dtype."""
    flags = dict(max_new_tokens=4, return_dict_in_generate=True, output_logits=True)
    flags |= dict(prefix_allowed_tokens_fn=lambda batch, ids: [3 + len(ids)])  # one way for all, whatever rounding says
    exact = generate(llama, prompts([30, 16]), **flags).logits
    llama.forward = torch.autocast("cpu", torch.bfloat16)(llama.forward)
    try:
        default = generate(llama, prompts([30, 16]), **flags).logits
        with enabled(llama, dtype=dtype) as handle, kernel_calls(handle.pool) as calls:
            got = generate(llama, prompts([30, 16]), **flags).logits
    finally:
        del llama.forward
    assert calls
    for want, there, here in zip(exact, default, got, strict=True):
        assert there.dtype == here.dtype
        assert 0 < (here - want).norm() < 1.5 * (there - want).norm()


class Wrapper(torch.nn.Module):
    """Like DDP or PEFT: the model is inside, and `generate` is passed on."""

    def __init__(self, **parts: torch.nn.Module):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.generate(*args, **kwargs)


def test_wrappers() -> None:
    llama = tiny.build("llama", "sdpa")
    for wrapped in (Wrapper(module=llama), Wrapper(base=Wrapper(module=llama)), torch.compile(llama, backend="eager")):
        with enabled(wrapped) as handle:
            assert serves(llama, handle)
    with enabled(Wrapper(module=llama)) as handle, kernel_calls(handle.pool) as calls:
        Wrapper(module=llama).generate(**prompts([9]), max_new_tokens=2)
    assert calls


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda llama: ("a name",), TypeError, "got str"),
        (lambda llama: (llama.model,), TypeError, "LlamaModel holds none that can generate"),
        (lambda llama: (Wrapper(a=llama, b=tiny.build("gpt2")),), TypeError, "LlamaForCausalLM, GPT2LMHeadModel"),
        (lambda llama: (llama, "4GiB"), TypeError, "PagePool, got str"),
        (
            lambda llama: (llama, tiny.make_pool(tiny.build("gpt2"))),
            ValueError,
            r"kv_heads=2.* layer 0, not .*kv_heads=4",
        ),
        (lambda llama: (llama, PagePool([LayerGeometry(2, 16, 16)], num_blocks=9)), ValueError, "3 layers, not 1"),
        (
            lambda llama: (
                llama,
                PagePool([LayerGeometry(2, 16, 16)], num_blocks=9, device="meta", kernel="reference"),
            ),
            ValueError,
            "on cpu, not on meta",
        ),
        (lambda llama: (llama, tiny.make_pool(llama), dict(memory="1GiB")), TypeError, "memory were both given"),
        (lambda llama: (llama, None, dict(memory="1GiB", num_blocks=3)), ValueError, "give one of them"),
        (lambda llama: (llama, None, dict(memory=5)), ValueError, "memory=5 holds no block"),
    ],
)
def test_what_cannot_be_enabled(make: Any, error: type[Exception], match: str, llama: Any) -> None:
    model, pool, options = (*make(llama), None, None)[:3]
    with pytest.raises(error, match=match):
        hf_paged.enable(model, pool, **(options or {}))
    with Spy(llama) as spy:
        generate(llama, prompts([9]), max_new_tokens=2)
    assert PagedCache not in spy.caches


def test_says_why_it_cannot_hook_in(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", lambda self, other: None)
    with pytest.raises(RuntimeError, match=r"unknown parameters.*other.*Pass a PagedCache to generate"):
        hf_paged.enable(llama, num_blocks=9)


def test_measuring_a_model_draws_no_random_numbers() -> None:
    """In training mode dropout does, and a run with a seed would go on otherwise."""
    model = tiny.build("gpt2", "sdpa").train()
    assert model.config.resid_pdrop > 0
    for make in (hf_paged.enable, hf_paged.PagePool.for_model):
        with untouched(model):
            before = torch.get_rng_state()
            make(model, num_blocks=9)
            assert torch.equal(before, torch.get_rng_state())
