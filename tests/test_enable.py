"""`enable`: callers that pass no cache get a paged one, and the model is left as it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from test_decoding_modes import repetitive
from test_padding import kernel_calls
from tiny import CACHE, poison, prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StopStringCriteria,
    pipeline,
)
from transformers.generation import GenerationMixin

import hf_paged
from hf_paged import PagedCache, PagedEncoderDecoderCache

pytestmark = pytest.mark.filterwarnings("error")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": dict(do_sample=True, num_return_sequences=4),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "prompt lookup": dict(prompt_lookup_num_tokens=3, eos_token_id=159),
    "guidance": dict(guidance_scale=1.5),
    "chunks": dict(prefill_chunk_size=7),
}


@contextlib.contextmanager
def untouched(model: Any, attention: Any = "sdpa") -> Iterator[Any]:
    """The model under another attention implementation, as a caller has it who knows nothing of us. At the end it must be
    what it was."""
    model.set_attn_implementation(attention)
    before = state_of(model)
    yield model
    assert state_of(model) == before, "the model was changed"


@pytest.fixture
def llama(model_of: Callable[[str], Any]) -> Iterator[Any]:
    with untouched(model_of("llama")) as model:
        yield model


def state_of(model: Any) -> Any:
    """What `enable` must not change: attributes, configs, attention implementations, generation config."""
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return modules, [vars(config).copy() for config in configs.values()], model.generation_config.to_dict()


def enabled(model: Any, num_blocks: int = 400, block_size: int = 4, **kwargs: Any) -> Any:
    handle = hf_paged.enable(model, num_blocks=num_blocks, block_size=block_size, **kwargs)
    poison(handle.pool)
    return handle


def generate(model: Any, inputs: dict[str, Any], **flags: Any) -> Any:
    torch.manual_seed(0)
    flags = {"max_new_tokens": 12, **flags}
    return model.generate(**inputs, **{name: value for name, value in flags.items() if value is not None})


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Blocks must come back by themselves, not when the garbage collector happens to run."""
    gc.disable()
    yield
    gc.enable()


# ------------------------------------------------------------------------------------------------------------ callers


@pytest.mark.parametrize("mode", MODES)
def test_generate_runs_paged(mode: str, llama: Any, no_gc: None) -> None:
    inputs = repetitive() if mode == "prompt lookup" else prompts([16, 21, 10])
    want = generate(
        llama, inputs, **({} if mode == "prompt lookup" else MODES[mode])
    )  # the same, and right in all releases
    with enabled(llama) as handle:
        with kernel_calls(handle.pool) as calls:
            assert torch.equal(want, generate(llama, inputs, **MODES[mode]))
        assert calls and handle.pool.stats().used == 0 < handle.pool.stats().peak_used
        handle.pool.check_integrity()
    with kernel_calls(handle.pool) as calls:
        assert torch.equal(want, generate(llama, inputs, **({} if mode == "prompt lookup" else MODES[mode])))
    assert not calls


def letters() -> Any:
    """A tokenizer of single characters that fits the tiny models."""
    characters = [*map(chr, range(32, 127)), *map(chr, range(0x410, 0x410 + tiny.VOCAB - 99))]
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)


def test_pipeline(llama: Any, no_gc: None) -> None:
    pipe = pipeline("text-generation", model=llama, tokenizer=letters())
    texts = ["the quick brown fox", "jumps", "over the lazy dog again"]

    def ask() -> list[Any]:
        torch.manual_seed(0)
        return [
            pipe(texts[0], max_new_tokens=8),
            pipe(texts, max_new_tokens=8, batch_size=3),
            pipe(texts, max_new_tokens=8, batch_size=2, do_sample=True, num_return_sequences=3),
            pipe(texts, max_new_tokens=8, batch_size=3, num_beams=4, num_return_sequences=2, return_full_text=False),
        ]

    before = state_of(llama)[2]  # a pipeline sets its own generation config
    want = ask()
    with enabled(llama) as handle, kernel_calls(handle.pool) as calls:
        assert ask() == want
    assert calls and handle.pool.stats().used == 0
    llama.generation_config = type(llama.generation_config)(**before)


def test_evaluation_loop(llama: Any, no_gc: None) -> None:
    """As evaluation harnesses do it: log-likelihoods by a plain forward pass, answers up to a stop string."""
    tokenizer = letters()

    def evaluate() -> Any:
        answers, scores = [], []
        for texts in (["Q: 1+1? A:", "Q: name a colour A:", "A:"], ["what", "a longer question"]):
            batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
            stop = [StopStringCriteria(tokenizer, ["t", "m"])]
            length = dict(max_length=batch["input_ids"].shape[1] + 30)
            flags = dict(do_sample=False, use_cache=True, stopping_criteria=stop, pad_token_id=0, max_new_tokens=None)
            answers.append(generate(llama, dict(batch), **length, **flags))
            with torch.no_grad():
                scores.append(llama(**batch).logits.log_softmax(-1))
        return answers, scores

    answers, scores = evaluate()
    with enabled(llama) as handle, kernel_calls(handle.pool) as calls:
        got_answers, got_scores = evaluate()
    assert calls and handle.pool.stats().used == 0
    for want, got in zip(answers + scores, got_answers + got_scores, strict=True):
        assert torch.equal(want, got)
    assert answers[0].shape[1] < 30, "the stop strings were not met"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_reinforcement_learning_step(checkpointing: bool, no_gc: None) -> None:
    """Eight equal rows, samples, forward and backward, an optimizer step, and again: the tokens, losses and gradients that
    come without hf_paged, from a prompt that is stored once. All in training mode, as trainers have it."""
    ids = prompts([30])["input_ids"].repeat(8, 1)

    def train(paged: bool) -> tuple[list[Any], Any]:
        model = tiny.build("llama", "sdpa").train()
        handle = enabled(model) if paged else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen: list[Any] = []
        for step in range(2):
            torch.manual_seed(step)
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=8)
            with warnings.catch_warnings(action="ignore"):  # newer releases have another name for it
                model.gradient_checkpointing_enable() if checkpointing else None
                logits = model(out[:, :-1], use_cache=False).logits[:, 29:]
                model.gradient_checkpointing_disable()
            chosen = logits.log_softmax(-1).gather(2, out[:, 30:, None])[..., 0]
            loss = -(chosen.sum(1) * torch.linspace(-1, 1, 8)).mean()
            optimizer.zero_grad()
            loss.backward()
            seen += [out, loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            optimizer.step()
        return seen, handle and handle.pool.stats()

    want, _ = train(paged=False)
    got, stats = train(paged=True)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    assert stats.used == 0
    # 7 whole blocks of the prompt once; the 8th, and those of 7 new tokens (the last is never fed), per row
    assert stats.peak_used == 7 + 8 * 3


# ------------------------------------------------------------------------------------------------------- life of a cache


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_cache_in_the_output_lives_as_long_as_it_is_held(mode: str, llama: Any, no_gc: None) -> None:
    inputs, flags = prompts([9, 5]), dict(return_dict_in_generate=True, **MODES[mode])
    want = generate(llama, inputs, **flags)
    with enabled(llama) as handle:
        out = generate(llama, inputs, **flags)
        assert torch.equal(want.sequences, out.sequences)
        cache = getattr(out, CACHE)
        assert isinstance(cache, PagedCache) and handle.pool.stats().used > 0
        torch.testing.assert_close(
            cache.layers[1].keys.dense()[:, :, -1], getattr(want, CACHE).layers[1].keys[:, :, -1]
        )
        if mode == "greedy":  # goes on from it, natively
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1)
            more = dict(input_ids=out.sequences, attention_mask=mask)
            with kernel_calls(handle.pool) as calls:
                second = generate(llama, more, max_new_tokens=5, **{CACHE: cache})
            assert calls and torch.equal(second, generate(llama, inputs, max_new_tokens=17))
    assert handle.pool.stats().used > 0
    del out, cache
    assert handle.pool.stats().used == 0


class Raise(LogitsProcessor):
    def __init__(self, error: type[BaseException], at: int):
        self.error, self.at = error, at

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == self.at:
            raise self.error("stop here")
        return scores


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["plain", "assisted"])
def test_failure_leaves_nothing_behind(error: type[BaseException], kind: str, llama: Any, no_gc: None) -> None:
    inputs, assistant = prompts([9]), tiny.build("llama", "eager", seed=5)
    extra = dict(assistant_model=assistant) if kind == "assisted" else {}
    with enabled(llama) as handle, enabled(assistant) as other:
        with pytest.raises(error) as held:  # the traceback holds every frame, and so the cache
            generate(llama, inputs, logits_processor=[Raise(error, 13)], **extra)
        assert held.tb is not None
        for pool in (handle.pool, other.pool):
            assert pool.stats().used == 0
            pool.check_integrity()
        assert other.pool.stats().peak_used > 0 or kind == "plain"
        assert (llama.config._attn_implementation, assistant.config._attn_implementation) == ("sdpa", "eager")
        assert generate(llama, inputs).shape[1] == 21
    with pytest.raises(error), enabled(llama):
        raise error
    with kernel_calls(handle.pool) as calls:
        generate(llama, inputs)
    assert not calls


def test_shortage_is_an_error_that_changes_nothing(llama: Any) -> None:
    with enabled(llama, num_blocks=6) as handle:
        with pytest.raises(hf_paged.PoolExhausted):
            generate(llama, prompts([21, 9]))
        assert handle.pool.stats().used == 0
        assert torch.equal(generate(llama, prompts([9])), tiny.default(llama, prompts([9]), max_new_tokens=12))


@pytest.mark.parametrize("who", ["main", "assistant", "both"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_assistants(who: str, kind: str, model_of: Callable[[str], Any], no_gc: None) -> None:
    """Either model may be enabled. mistral has windows, out of which the assistant's blocks must not leave for good."""
    assistant, inputs = tiny.build(kind, "sdpa", seed=5), prompts([13])
    with untouched(model_of(kind)) as model, untouched(assistant):
        want = generate(model, inputs, max_new_tokens=40)
        handles = [enabled(one) for one, name in ((model, "main"), (assistant, "assistant")) if who in (name, "both")]
        assert torch.equal(want, generate(model, inputs, max_new_tokens=40, assistant_model=assistant))
        for handle in handles:
            assert handle.pool.stats().used == 0 < handle.pool.stats().peak_used
            handle.pool.check_integrity()
            handle.disable()


@pytest.mark.parametrize("flags", [dict(), dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)])
def test_encoder_decoder(flags: dict[str, Any], no_gc: None) -> None:
    torch.manual_seed(0)
    size = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    size |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=160, max_position_embeddings=128, init_std=0.5)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None, decoder_start_token_id=2)
    model = BartForConditionalGeneration(BartConfig(**size, **tokens)).eval()
    inputs = prompts([9, 13])
    with untouched(model, "eager"):
        want = generate(model, inputs, **flags)
        with enabled(model) as handle, Spy(model) as spy:
            assert torch.equal(want, generate(model, inputs, **flags))
        assert set(spy.caches) == {PagedEncoderDecoderCache} and set(spy.attention) == {"paged"}
        assert handle.pool.stats().used == 0 < handle.pool.stats().peak_used


def test_threads(llama: Any) -> None:
    """Several threads on one model: each call has a cache of its own, and the attention is put back by the last."""
    jobs = [(prompts([9 + i, 5 + i], seed=i), MODES[mode]) for i, mode in enumerate(["greedy", "beams"] * 3)]
    jobs = [(inputs, {**flags, "do_sample": False}) for inputs, flags in jobs]
    want = [generate(llama, inputs, **flags) for inputs, flags in jobs]
    got: dict[int, Any] = {}
    with enabled(llama, num_blocks=2000) as handle:

        def work(index: int) -> None:
            inputs, flags = jobs[index]
            got[index] = [llama.generate(**inputs, max_new_tokens=12, **flags) for _ in range(2)]

        threads = [threading.Thread(target=work, args=[index]) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.pool.stats().used == 0
        handle.pool.check_integrity()
    for index, tokens in enumerate(want):
        assert all(torch.equal(tokens, again) for again in got[index])


# ------------------------------------------------------------------------------------------------- whose cache, whose attention


class Spy:
    """Caches, and attention implementations of the decoder, of every forward pass."""

    def __init__(self, model: Any):
        self.caches: list[Any] = []
        self.attention: list[str] = []
        self.model = model
        self.hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.caches.append(type(kwargs.get(CACHE)))
        self.attention.append(module.config.get_text_config(decoder=True)._attn_implementation)

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hook.remove()


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
    with hf_paged.enable(model, before), pytest.raises(ValueError, match="bfloat16"):
        generate(model, prompts([9]))


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
