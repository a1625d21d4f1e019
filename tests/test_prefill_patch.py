"""Prompts are computed once, and only where rows are provably equal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hf_paged.patches import prefill
from test_padding import kernel_calls
from tiny import CACHE, default, make_pool, paged, prompts
from transformers.generation import GenerationMixin

from hf_paged import PagedCache, patches


def rows_computed(model: Any, inputs: dict[str, Any], **flags: Any) -> int:
    """Rows of the first forward pass, after a check against the default cache."""
    pool = make_pool(model, 600)
    with kernel_calls(pool) as calls:
        got = paged(model, inputs, pool, max_new_tokens=4, **flags)
    assert torch.equal(default(model, inputs, max_new_tokens=4, **flags), got)
    return calls[0][0]


def test_rows_that_the_caller_repeated(llama: Any) -> None:
    inputs = {name: value[[0, 1, 0, 2, 1, 0]] for name, value in prompts([9, 4, 7]).items()}
    assert rows_computed(llama, inputs) == 3
    assert rows_computed(llama, inputs, num_beams=3) == 3
    assert rows_computed(llama, inputs, do_sample=True, num_return_sequences=2) == 3
    assert rows_computed(llama, prompts([9, 4, 7])) == 3


def test_equal_tokens_under_different_masks_are_different_rows(llama: Any) -> None:
    ids = prompts([9])["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    assert rows_computed(llama, dict(input_ids=ids, attention_mask=mask)) == 2


def test_different_positions_are_different_rows(llama: Any) -> None:
    ids = prompts([9])["input_ids"].repeat(2, 1)
    pool = make_pool(llama)
    positions = torch.arange(9).repeat(2, 1) + torch.tensor([[0], [5]])
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions)
    with kernel_calls(pool) as calls:
        paged(llama, inputs, pool, max_new_tokens=1)
    assert calls[0][0] == 2


def test_equal_ids_on_different_pasts_are_different_rows(llama: Any) -> None:
    """The cache counts: same new tokens after two different prefixes, twice each."""
    past, new = prompts([6, 6])["input_ids"], prompts([3], 4)["input_ids"].repeat(4, 1)
    pool = make_pool(llama)
    with PagedCache(pool) as cache:
        with torch.no_grad():
            llama(past, **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        ids = torch.cat([past.repeat_interleave(2, 0), new], 1)
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        with kernel_calls(pool) as calls:
            got = llama.generate(**inputs, max_new_tokens=5, **{CACHE: cache})
        assert calls[0][0] == 2
        assert torch.equal(default(llama, inputs, max_new_tokens=5), got)
        assert cache.lengths == [13] * 4


@pytest.mark.parametrize(
    "extra",
    [dict(inputs_embeds=torch.zeros(2, 9, 64)), dict(pixel_values=torch.zeros(2, 3)), dict(anything=1)],
    ids=["inputs_embeds", "pixel_values", "unknown"],
)
def test_unknown_arguments_are_not_shared(extra: dict[str, Any], llama: Any) -> None:
    ids = prompts([9])["input_ids"].repeat(2, 1)
    cache = PagedCache(make_pool(llama))
    known = dict(attention_mask=torch.ones_like(ids), position_ids=torch.arange(9)[None], use_cache=True, cache=cache)
    assert prefill.equal_rows(ids, known, cache) is not None
    assert prefill.equal_rows(ids, {**known, **extra}, cache) is None
    assert prefill.equal_rows(ids, {**known, **dict.fromkeys(extra)}, cache) is not None  # None is no argument


def test_inputs_embeds_take_the_ordinary_way(llama: Any) -> None:
    ids = prompts([9])["input_ids"].repeat(2, 1)
    inputs = dict(inputs_embeds=llama.get_input_embeddings()(ids).detach())
    assert torch.equal(
        default(llama, inputs, max_new_tokens=6), paged(llama, inputs, make_pool(llama), max_new_tokens=6)
    )


@pytest.mark.parametrize("source", ["none", "config", "attribute", "module", "batch norm"])
def test_training_mode_is_shared_without_dropout(source: str, llama: Any) -> None:
    """Reinforcement learning generates in training mode. Dropout, or statistics of the batch, tell equal rows apart."""
    pool, inputs = make_pool(llama), {name: value.repeat(3, 1) for name, value in prompts([9]).items()}
    attention, layer = llama.model.layers[1].self_attn, llama.model.layers[2]
    add = {
        "none": lambda: None,
        "config": lambda: setattr(llama.config, "resid_pdrop", 0.1),
        "attribute": lambda: setattr(attention, "attention_dropout", 0.1),
        "module": lambda: layer.add_module("extra", torch.nn.Dropout(0.1)),
        "batch norm": lambda: layer.add_module("extra", torch.nn.BatchNorm1d(4)),
    }
    add[source]()
    try:
        for training in (True, False):
            llama.train(training)
            with kernel_calls(pool) as calls:
                paged(llama, inputs, pool, max_new_tokens=2)
            assert calls[0][0] == (3 if training and source != "none" else 1)
    finally:
        attention.attention_dropout = 0.0
        layer.extra = None
        del layer.extra
        if source == "config":
            del llama.config.resid_pdrop


def test_logits_of_every_position_have_the_callers_shape(llama: Any) -> None:
    inputs = {name: value.repeat(3, 1) for name, value in prompts([9, 4]).items()}
    flags = dict(max_new_tokens=3, return_dict_in_generate=True, output_hidden_states=True, output_logits=True)
    out = paged(llama, inputs, make_pool(llama), **flags)
    assert out.logits[0].shape == (6, 160) and out.hidden_states[0][0].shape == (6, 9, 64)
    assert torch.equal(out.hidden_states[0][1][:2], out.hidden_states[0][1][2:4])


def test_other_caches_are_left_alone(llama: Any) -> None:
    inputs = {name: value.repeat(3, 1) for name, value in prompts([9]).items()}
    shapes: list[int] = []
    hook = llama.model.embed_tokens.register_forward_hook(lambda module, args, out: shapes.append(out.shape[0]))
    llama.generate(**inputs, max_new_tokens=2)
    hook.remove()
    assert shapes == [3, 3]


def test_applied_once_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GenerationMixin._prefill._hf_paged  # type: ignore[attr-defined]
    before = GenerationMixin._prefill
    patches.apply()
    assert GenerationMixin._prefill is before
    monkeypatch.setattr(GenerationMixin, "_prefill", lambda self, something, different: None)
    with pytest.warns(UserWarning, match=r"sharing of equal prompts is off, results stay right: .*something"):
        patches.apply()
    monkeypatch.delattr(GenerationMixin, "_prefill")
    with pytest.warns(UserWarning, match="_prefill does not exist"):
        patches.apply()


def test_patches_can_be_turned_off() -> None:
    code = "import hf_paged, transformers; print(hasattr(transformers.GenerationMixin._prefill, '_hf_paged'))"
    environment = {**os.environ, "HF_PAGED_PATCHES": "0"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert out == "False\n"


def test_right_without_the_patch(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, "_prefill", GenerationMixin._prefill.__wrapped__)  # type: ignore[attr-defined]
    inputs = prompts([9, 4])
    for flags in (dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)):
        want = default(llama, inputs, max_new_tokens=8, **flags)
        assert torch.equal(want, paged(llama, inputs, make_pool(llama), max_new_tokens=8, **flags))
