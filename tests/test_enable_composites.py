"""`enable` and models with a `generate` of their own: those that are not enabled go on as before, and those that let a model
inside generate run paged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from enabling import enabled, untouched
from test_padding import kernel_calls
from transformers import (
    BartConfig,
    BertConfig,
    Blip2Config,
    Blip2ForConditionalGeneration,
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


def blip2() -> Any:
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    former = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    text = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32)
    config = Blip2Config(
        vision_config=dict(**vision, image_size=8, patch_size=4),
        qformer_config=dict(**former, encoder_hidden_size=32, vocab_size=tiny.VOCAB),
        text_config=dict(model_type="opt", vocab_size=tiny.VOCAB, max_position_embeddings=64, pad_token_id=1, **text),
        num_query_tokens=4,
        image_token_index=98,
    )
    model = tiny.condition(Blip2ForConditionalGeneration(config), 2)
    model.language_model.generation_config.eos_token_id = None
    model.config.image_token_id = 98
    return model


def test_a_model_inside_generates() -> None:
    model = blip2()
    ids = torch.tensor([[98] * 4 + [5, 6, 7]])
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    flags = dict(pixel_values=pixels, input_ids=ids, max_new_tokens=12, num_beams=3)
    want = model.generate(**flags)
    assert want.unique().numel() > 5
    with untouched(model, {}):
        with enabled(model) as handle, kernel_calls(handle.pool) as calls:
            assert torch.equal(want, model.generate(**flags))
            assert calls or RELEASE < (5, 10)  # there the blocks are read by the dense path
            assert handle.pool.stats().used == 0 < handle.pool.stats().peak_used
            calls.clear()
        assert torch.equal(want, model.generate(**flags)) and not calls


def test_says_when_nothing_runs_paged() -> None:
    class Careless(type(tiny.build("llama"))):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return None

    model = Careless(tiny.CONFIGS["llama"]())
    with enabled(model), pytest.warns(UserWarning, match="Careless.generate makes no cache"):
        model.generate()
