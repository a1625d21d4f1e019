"""`enable` and models with a `generate` of their own: those that are not enabled go on as before, and those that let a model
inside generate run paged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from enabling import enabled
from transformers import (
    BartConfig,
    BertConfig,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    RagConfig,
    RagTokenForGeneration,
)

from hf_paged.compat import RELEASE

pytestmark = pytest.mark.filterwarnings("error")
BART: dict[str, Any] = dict(
    vocab_size=tiny.VOCAB, d_model=32, pad_token_id=0, bos_token_id=1, decoder_start_token_id=2, eos_token_id=2
)
BART |= {
    f"{half}_{what}": value
    for half in ("encoder", "decoder")
    for what, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}


def musicgen() -> Callable[[], torch.Tensor]:
    size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=64)
    config = MusicgenDecoderConfig(vocab_size=tiny.VOCAB, num_codebooks=4, pad_token_id=159, bos_token_id=159, **size)
    model = tiny.condition(MusicgenForCausalLM(config), 2)
    model.generation_config.update(decoder_start_token_id=159, pad_token_id=159, bos_token_id=159)
    ids = torch.randint(3, 150, (4, 5), generator=torch.Generator().manual_seed(0))
    flags = dict(max_length=12, do_sample=False, guidance_scale=1, num_return_sequences=1)
    return functools.partial(model.generate, ids, **flags)


def rag() -> Callable[[], torch.Tensor]:
    encoder = BertConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    config = RagConfig.from_question_encoder_generator_configs(encoder, BartConfig(**BART), n_docs=2)
    model = tiny.condition(RagTokenForGeneration(config), 2)
    model.generation_config.update(decoder_start_token_id=2, pad_token_id=0, bos_token_id=1)
    ids = torch.randint(3, tiny.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    context = dict(context_input_ids=ids, context_attention_mask=torch.ones_like(ids), doc_scores=torch.ones(1, 2))
    return functools.partial(model.generate, **context, max_length=12)


@pytest.mark.parametrize(
    "make",
    [pytest.param(musicgen, marks=pytest.mark.skipif(RELEASE < (5, 24), reason="its generate fails by itself")), rag],
)
def test_other_models_go_on_as_before(make: Callable[[], Callable[[], torch.Tensor]]) -> None:
    """They hand `_prepare_cache_for_generation` its arguments by name."""
    generate = make()
    want = generate()
    assert want.unique().numel() > 2
    with enabled(tiny.build("llama", "sdpa")):
        assert torch.equal(want, generate())
    assert torch.equal(want, generate())
