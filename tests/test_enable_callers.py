"""`enable` under the code it is for: pipelines, evaluation loops, reinforcement learning; and where its blocks go."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from enabling import Spy, enabled, generate, state_of, untouched
from test_decoding_modes import repetitive
from test_padding import kernel_calls
from tiny import CACHE, prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StopStringCriteria,
    pipeline,
)

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


@pytest.fixture
def llama(model_of: Callable[[str], Any]) -> Iterator[Any]:
    with untouched(model_of("llama")) as model:
        yield model


# ------------------------------------------------------------------------------------------------------------ callers


@pytest.mark.parametrize("mode", MODES)
def test_generate_runs_paged(mode: str, llama: Any, no_gc: None) -> None:
    inputs = repetitive() if mode == "prompt lookup" else prompts([16, 21, 10])
    with tiny.upstream():
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer releases have another name for it
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
    with untouched(model_of(kind)) as model, untouched(assistant), contextlib.ExitStack() as stack:
        want = generate(model, inputs, max_new_tokens=40)
        ones = [one for one, name in ((model, "main"), (assistant, "assistant")) if who in (name, "both")]
        handles = [stack.enter_context(enabled(one)) for one in ones]
        with tiny.upstream():  # where the model itself keeps its default cache
            got = generate(model, inputs, max_new_tokens=40, assistant_model=assistant)
        assert torch.equal(want, got)
        for handle in handles:
            assert handle.pool.stats().used == 0 < handle.pool.stats().peak_used
            handle.pool.check_integrity()


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
