"""Images among the tokens: equal tokens are not equal rows, and an image after a cached prefix is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_packing import shapes_of
from tiny import (
    CACHE,
    COMMON,
    GQA,
    KNOWS_POSITIONS,
    SIZE,
    SLIDING_FULL,
    VOCAB,
    condition,
    default,
    make_pool,
    paged,
    prompts,
)
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)

from hf_paged import PagedCache
from hf_paged.compat import RELEASE

IMAGE = 150  # its token; each image takes four
TEXT = dict(suppress_tokens=list(range(IMAGE, VOCAB)))  # what is generated holds no image
VISION: dict[str, Any] = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)


def llava() -> Any:
    vision = CLIPVisionConfig(**VISION, image_size=16, patch_size=8, projection_dim=32)
    text = LlamaConfig(**SIZE, **GQA, **COMMON)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, image_seq_length=4)
    )


def gemma3() -> Any:
    """Its image tokens see each other in both directions, in layers of both kinds."""
    text = Gemma3TextConfig(**SIZE, **GQA, **COMMON, sliding_window=8, layer_types=SLIDING_FULL)
    vision = SiglipVisionConfig(**VISION, image_size=16, patch_size=4)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )
    return Gemma3ForConditionalGeneration(config)


def qwen2_vl() -> Any:
    """Positions in three dimensions, which do not advance with the tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text: dict[str, Any] = dict(**SIZE, num_key_value_heads=2, **COMMON, rope_parameters=rope)
    vision = dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2)
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
    )
    return Qwen2VLForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {"llava": llava, "gemma3": gemma3, "qwen2_vl": qwen2_vl}


def pixels(kind: str, seeds: list[int]) -> dict[str, torch.Tensor]:
    """One random image per seed, as the model's processor would deliver it."""
    shape = (16, 3 * 2 * 4 * 4) if kind == "qwen2_vl" else (3, 16, 16)
    images = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    if kind == "qwen2_vl":
        return dict(pixel_values=images.flatten(0, 1), image_grid_thw=torch.tensor([[1, 4, 4]]).repeat(len(seeds), 1))
    return dict(pixel_values=images)


def with_image(kind: str, lengths: list[int], seeds: list[int], **kwargs: Any) -> dict[str, torch.Tensor]:
    """Prompts of these lengths with an image at the third to last position of each row."""
    inputs = prompts(lengths, **kwargs)
    ids = inputs["input_ids"]
    ids %= IMAGE
    ids[:, -7:-3] = IMAGE
    if kind == "qwen2_vl":
        ids[:, -8] = IMAGE + 2
    inputs |= pixels(kind, seeds)
    if kind == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if kind == "qwen2_vl" and RELEASE >= (5, 10):  # older releases know nothing of it, and need nothing
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return inputs


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str) -> Any:
    model = condition(MODELS[kind](), 2)
    model.set_attn_implementation("paged")
    return model


@pytest.mark.parametrize("flags", [{}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)])
def test_images_tell_equal_tokens_apart(kind: str, model: Any, flags: dict[str, Any]) -> None:
    """Three rows of the same tokens, two of them with the same image: the default cache's tokens, nothing shared."""
    inputs = {name: value for name, value in with_image(kind, [16], [1]).items() if "pixel" not in name}
    inputs = {name: value.repeat(3, 1) for name, value in inputs.items()} | pixels(kind, [1, 2, 1])
    want, pool = default(model, inputs, max_new_tokens=12, **TEXT, **flags), make_pool(model)
    with shapes_of(model) as shapes:
        got = paged(model, inputs, pool, max_new_tokens=12, **TEXT, **flags)
    assert torch.equal(want, got)
    each = len(want) // 3
    assert not torch.equal(want[:each, 16:], want[each : 2 * each, 16:]), "the image makes no difference"
    assert shapes[0][0] == (9 if flags else 3)


def test_ragged_rows_with_images(kind: str, model: Any) -> None:
    inputs = with_image(kind, [21, 12, 16], [1, 2, 3])
    for flags in ({}, dict(num_beams=3)):
        want = default(model, inputs, max_new_tokens=12, **TEXT, **flags)
        assert torch.equal(want, paged(model, inputs, make_pool(model), max_new_tokens=12, **TEXT, **flags))


@pytest.mark.parametrize("rows", [[0, 1, 0], [0, 0, 0, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_text_alone(kind: str, model: Any, block_size: int, rows: list[int]) -> None:
    """Without an image, equal rows are computed once as ever. Three and four rows: as many as directions of positions."""
    inputs = {name: value[rows] for name, value in prompts([16, 9, 12, 3]).items()}
    inputs["input_ids"] %= IMAGE
    pool = make_pool(model, 300, block_size)
    want = default(model, inputs, max_new_tokens=12, **TEXT)
    with shapes_of(model) as shapes:
        assert torch.equal(want, paged(model, inputs, pool, max_new_tokens=12, **TEXT))
    packed = KNOWS_POSITIONS and kind != "qwen2_vl" and len(set(rows)) > 1
    alone = not KNOWS_POSITIONS and kind == "qwen2_vl"  # the model itself notes something of every row
    assert shapes[0][0] == (1 if packed else len(rows) if alone else len(set(rows)))


def test_an_image_in_the_second_turn(kind: str, model: Any) -> None:
    """Text first, then the whole conversation with an image in its new part, on the cache of the first turn: the tokens of a
    default cache kept as long, and in newer releases of the whole at once. In older ones, what upstream does with an image
    depends on whether something is cached."""
    first = prompts([9], 5)
    first["input_ids"] %= IMAGE
    theirs = DynamicCache(config=model.config)

    with PagedCache(make_pool(model)) as cache:
        out = model.generate(**first, max_new_tokens=4, **TEXT, **{CACHE: cache})
        assert torch.equal(default(model, first, max_new_tokens=4, **TEXT, **{CACHE: theirs}), out)
        second = with_image(kind, [12], [3])
        old = len(out[0])
        ids = torch.cat([out, second["input_ids"]], 1)
        inputs = {**second, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in inputs:
            if name.endswith("token_type_ids"):
                inputs[name] = (ids == IMAGE).long()
        fresh = default(model, inputs, max_new_tokens=8, **TEXT)
        want = default(model, inputs, max_new_tokens=8, **TEXT, **{CACHE: theirs})
        assert torch.equal(want, fresh) or RELEASE < (5, 24)
        assert torch.equal(want, model.generate(**inputs, max_new_tokens=8, **TEXT, **{CACHE: cache}))
        assert cache.get_seq_length() == old + 12 + 7
        third = torch.cat([want, prompts([6], 6)["input_ids"] % IMAGE], 1)  # the image is cached by now
        more = {**inputs, "input_ids": third, "attention_mask": torch.ones_like(third)}
        more |= {name: (third == IMAGE).long() for name in inputs if name.endswith("token_type_ids")}
        text = {name: value for name, value in more.items() if not name.startswith(("pixel", "image"))}
        want = default(model, text, max_new_tokens=8, **TEXT, **{CACHE: theirs})
        assert torch.equal(want, default(model, more, max_new_tokens=8, **TEXT)) or RELEASE < (5, 24)
        assert torch.equal(want, model.generate(**text, max_new_tokens=8, **TEXT, **{CACHE: cache}))
    other = default(model, {**inputs, **pixels(kind, [4])}, max_new_tokens=8, **TEXT)
    assert not torch.equal(fresh, other), "the image makes no difference"
