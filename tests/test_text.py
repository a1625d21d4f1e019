"""Modes of `generate` that need a tokenizer: stop strings, token healing, text streamers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import VOCAB, default, make_pool, paged
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextStreamer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per letter, and pairs of letters, so that a prompt may end inside a longer token."""
    letters = "abcdefghijkl"
    words = ["<pad>", "<bos>", *letters, *(a + b for a in letters for b in letters)][:VOCAB]
    merges = [(word[0], word[1]) for word in words[2 + len(letters) :]]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", padding_side="left")


def texts(tokenizer: Any, *lines: str) -> dict[str, torch.Tensor]:
    inputs = tokenizer(list(lines), return_tensors="pt", padding=True)
    return dict(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])


@pytest.mark.parametrize("flags", [{}, dict(num_beams=3)])
def test_stop_strings(flags: dict[str, Any], llama: Any, tokenizer: Any) -> None:
    inputs = texts(tokenizer, "abcdefgabc", "kl")
    free = default(llama, inputs, max_new_tokens=24, **flags)
    stops = [
        tokenizer.decode(free[0, -12:-10]),
        tokenizer.decode(free[1, -9:-7]),
    ]  # it goes on until all rows have met one
    flags = dict(flags, max_new_tokens=24, stop_strings=stops, tokenizer=tokenizer)
    want = default(llama, inputs, **flags)
    assert torch.equal(want, paged(llama, inputs, make_pool(llama), **flags))
    assert not torch.equal(want, free), "nothing was stopped"


def test_token_healing(llama: Any, tokenizer: Any) -> None:
    inputs = texts(tokenizer, "abcdefg", "klabc")
    flags = dict(max_new_tokens=8, token_healing=True, tokenizer=tokenizer)
    want = default(llama, inputs, **flags)
    assert torch.equal(want, paged(llama, inputs, make_pool(llama), **flags))
    width = inputs["input_ids"].shape[1]
    assert not torch.equal(want[:, :width], inputs["input_ids"]), "there was nothing to heal"


@pytest.mark.parametrize("flags", [{}, dict(do_sample=True), dict(prompt_lookup_num_tokens=3, eos_token_id=VOCAB)])
def test_text_streamer(flags: dict[str, Any], llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = texts(tokenizer, "abcdefgabcdefgabcdefg")
    printed = []
    for run in (default, lambda *args, **kwargs: paged(*args, make_pool(llama), **kwargs)):
        out = run(llama, inputs, max_new_tokens=12, streamer=TextStreamer(tokenizer), **flags)
        printed.append(capsys.readouterr().out)
        assert printed[-1].strip() == tokenizer.decode(out[0]).strip()
    assert printed[0] == printed[1]
