"""`generate` gives the default cache's tokens in every decoding mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CACHE, default, make_pool, paged, prompts

from hf_paged import PagedCache

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": dict(do_sample=True),
    "samples": dict(do_sample=True, num_return_sequences=8),
    "beams": dict(num_beams=4),
    "all beams": dict(num_beams=4, num_return_sequences=4),
    "beam sampling": dict(num_beams=3, do_sample=True),
    "chunked prefill": dict(prefill_chunk_size=7),
    "chunked beams": dict(prefill_chunk_size=5, num_beams=3),
}
KINDS = ["llama", "qwen2", "gpt2", "gpt_neox", "mistral", "gemma2", "gemma3"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_default(kind: str, mode: str, model_of: Callable[[str], Any]) -> None:
    model, inputs = model_of(kind), prompts([16, 21, 10])
    reference = "eager" if kind == "gemma2" else "sdpa"  # sdpa drops gemma2's softcap
    want = default(model, inputs, reference, max_new_tokens=20, **MODES[mode])
    got = paged(model, inputs, make_pool(model), max_new_tokens=20, **MODES[mode])
    assert torch.equal(want, got)
    assert want[:, 21:].unique().numel() > 5, "the tokens are degenerate and prove nothing"


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams", "chunked prefill"])
def test_paged_cache_under_other_attention(attn: str, mode: str, llama: Any) -> None:
    """Any attention implementation reads a PagedCache right, through the dense view."""
    inputs = prompts([16, 21, 10])
    want = default(llama, inputs, attn, max_new_tokens=20, **MODES[mode])
    llama.set_attn_implementation(attn)
    assert torch.equal(want, paged(llama, inputs, make_pool(llama), max_new_tokens=20, **MODES[mode]))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", ["past_key_values", CACHE])
def test_both_argument_names(name: str, llama: Any) -> None:
    inputs = prompts([9])
    want = default(llama, inputs, max_new_tokens=8)
    with PagedCache(make_pool(llama)) as cache:
        assert torch.equal(want, llama.generate(**inputs, max_new_tokens=8, **{name: cache}))
        assert cache.lengths == [16]  # the last token is never fed


@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_scores_and_dict_outputs(mode: str, llama: Any) -> None:
    inputs = prompts([16, 21])
    flags = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)
    want = default(llama, inputs, max_new_tokens=6, **flags, **MODES[mode])
    got = paged(llama, inputs, make_pool(llama), max_new_tokens=6, **flags, **MODES[mode])
    assert torch.equal(want.sequences, got.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(want[name], got[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    real = inputs["attention_mask"].bool().repeat_interleave(len(got.sequences) // 2 if mode == "samples" else 1, 0)
    for step, (a, b) in enumerate(zip(want.hidden_states, got.hidden_states, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            if step or mode == "greedy":
                keep = slice(None) if step else real
                torch.testing.assert_close(x[keep], y[keep], rtol=1e-3, atol=1e-3)


def test_streamer_and_stopping_criteria(llama: Any) -> None:
    class Collect:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    inputs = prompts([9])

    def stop(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 15)

    streams = Collect(), Collect()
    want = default(llama, inputs, max_new_tokens=30, streamer=streams[0], stopping_criteria=[stop])
    got = paged(llama, inputs, make_pool(llama), max_new_tokens=30, streamer=streams[1], stopping_criteria=[stop])
    assert torch.equal(want, got) and want.shape[1] == 15
    assert streams[0].tokens == streams[1].tokens


def test_ragged_conversation(model_of: Callable[[str], Any]) -> None:
    """Three turns of a batch whose pads end up in the middle of its rows: each row as if it were alone."""
    for kind in ["llama", "qwen2", "gpt2", "gpt_neox", "mistral"]:
        model = model_of(kind)
        pool = make_pool(model)
        turns = [prompts([5, 9, 1], 1), prompts([7, 2, 4], 2), prompts([1, 3, 8], 3)]
        alone = [torch.empty(1, 0, dtype=torch.long) for _ in range(3)]
        ids = mask = torch.empty(3, 0, dtype=torch.long)
        with PagedCache(pool) as cache:
            for turn in turns:
                ids = torch.cat([ids, turn["input_ids"]], 1)
                mask = torch.cat([mask, turn["attention_mask"]], 1)
                out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, **{CACHE: cache})
                for row in range(3):
                    new = turn["input_ids"][row][turn["attention_mask"][row].bool()]
                    alone[row] = torch.cat([alone[row], new[None]], 1)
                    inputs = dict(input_ids=alone[row], attention_mask=torch.ones_like(alone[row]))
                    alone[row] = default(model, inputs, max_new_tokens=6)
                    assert alone[row][0, -6:].tolist() == out[row, -6:].tolist(), (kind, row)
                mask = torch.cat([mask, torch.ones(3, 6, dtype=torch.long)], 1)
                ids = out
            real = [row.shape[1] - 1 for row in alone]  # the last token is not fed
            assert cache.lengths == real
            if kind != "mistral":  # whose window gives blocks back
                assert pool.stats().used == sum(-(-length // 4) for length in real)


def test_plain_forward_calls(llama: Any) -> None:
    """A decoding loop by hand, with logits of all positions."""
    ids = prompts([30])["input_ids"]
    llama.set_attn_implementation("sdpa")
    want = llama(ids).logits
    llama.set_attn_implementation("paged")
    with torch.no_grad(), PagedCache(make_pool(llama)) as cache:
        parts = [llama(part, **{CACHE: cache}).logits for part in (ids[:, :11], ids[:, 11:12], ids[:, 12:])]
        torch.testing.assert_close(torch.cat(parts, 1), want.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["greedy", "sample", "samples", "beams", "beam sampling", "chunked prefill"])
def test_real_model(mode: str, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    texts = [
        "The three primary colours are",
        "Paged memory was invented because programs",
        "Once upon a time there was",
    ]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
    want = default(model, inputs, max_new_tokens=16, **MODES[mode])
    got = paged(model, inputs, make_pool(model, 200, 16), max_new_tokens=16, **MODES[mode])
    assert torch.equal(want, got)


def test_real_model_conversation(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    turns = [
        ["Hi, who are you?", "Name a colour."],
        ["Why?", "Another one, please, and say what it is like."],
        ["Thanks!", "Ok."],
    ]
    alone = [torch.empty(1, 0, dtype=torch.long)] * 2
    ids = mask = torch.empty(2, 0, dtype=torch.long)
    with PagedCache(make_pool(model, 60, 16)) as cache:
        for texts in turns:
            turn = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
            ids, mask = torch.cat([ids, turn.input_ids], 1), torch.cat([mask, turn.attention_mask], 1)
            length = dict(max_new_tokens=8, min_new_tokens=8)
            out = model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **length)
            for row in range(2):
                new = turn.input_ids[row][turn.attention_mask[row].bool()]
                alone[row] = torch.cat([alone[row], new[None]], 1)
                inputs = dict(input_ids=alone[row], attention_mask=torch.ones_like(alone[row]))
                alone[row] = default(model, inputs, **length)
                assert alone[row][0, -8:].tolist() == out[row, -8:].tolist()
            ids, mask = out, torch.cat([mask, torch.ones(2, 8, dtype=torch.long)], 1)
