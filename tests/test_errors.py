"""What users get wrong: each error names the value, and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import CACHE, VOCAB, make_pool, prompts
from transformers import BartConfig, BartForConditionalGeneration

from hf_paged import LayerGeometry, PagedCache, PagedEncoderDecoderCache, PagePool, PoolExhausted

ONE = [LayerGeometry(1, 8, 8)]
WHOLE = "must be an int of at least 1"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(memory="1MiB", max_memory="lots"), ValueError, "max_memory='lots' is not a size"),
        (dict(memory="2MiB", max_memory="1MiB"), ValueError, "max_memory='1MiB' holds 1024 blocks, but the pool starts"),
        (dict(num_blocks=4, max_memory=0), ValueError, "max_memory=0 holds 0 blocks, but the pool starts with 4"),
        *((dict(num_blocks=4, block_size=x), ValueError, f"block_size={x!r} {WHOLE}") for x in (16.0, "16", True, 0)),
        *((dict(num_blocks=x), ValueError, f"num_blocks={x!r} {WHOLE}") for x in (2.5, "10", False, -3)),
        *((dict(num_blocks=4, dtype=x), ValueError, f"dtype={x!r} must be a float") for x in ("bfloat16", torch.int8)),
        (dict(layers=[*ONE, LayerGeometry(0, 8, 8)]), ValueError, "layers[1] is LayerGeometry(kv_heads=0"),
        (dict(layers=[LayerGeometry(1, -8, 8)]), ValueError, "layers[0] is LayerGeometry(kv_heads=1, key_dim=-8"),
        (dict(layers=ONE[0]), TypeError, "layers[0] is 1: give a list of LayerGeometry or OwnLayer"),
        (dict(layers=[(1, 8, 8)]), TypeError, "layers[0] is (1, 8, 8): give a list of LayerGeometry or OwnLayer"),
    ],
)  # fmt: skip
def test_a_pool(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        PagePool(**{"layers": ONE, **arguments})


def test_a_pool_for_no_model(llama: Any) -> None:
    for wrong, named in (("gpt2", "'gpt2'"), (llama.config, "LlamaConfig"), (type(llama), "LlamaForCausalLM")):
        with pytest.raises(TypeError, match=rf"for_model needs a model, got .*{named}.*from_pretrained"):
            PagePool.for_model(wrong)


def test_a_pool_that_has_grown_as_far_as_it_may(llama: Any) -> None:
    per_block = make_pool(llama).bytes_per_block
    pool = make_pool(llama, 4, max_memory=12 * per_block)
    with pytest.raises(PoolExhausted, match=r"15 needed, 4 free of 4, which may grow to 12 \(0 in use") as caught:
        llama.generate(**prompts([60]), max_new_tokens=3, **{CACHE: PagedCache(pool)})
    assert (caught.value.num_blocks, caught.value.max_blocks) == (4, 12)
    with pytest.raises(PoolExhausted, match=r"15 needed, 4 free of 4 \(0 in use"):
        llama.generate(**prompts([60]), max_new_tokens=3, **{CACHE: PagedCache(make_pool(llama, 4))})


@pytest.mark.filterwarnings("ignore:.*past_key_values")
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (lambda pool: {CACHE: PagedCache}, TypeError, "got the class: pass PagedCache(pool)"),
        (lambda pool: {CACHE: pool}, TypeError, "got the pool: pass PagedCache(pool)"),
        (lambda pool: {CACHE: PagedCache(pool), "use_cache": False}, ValueError, "a PagedCache and use_cache=False"),
        (lambda pool: dict(cache=PagedCache(pool), past_key_values=PagedCache(pool)), ValueError, "name two caches"),
        (lambda pool: {CACHE: PagedEncoderDecoderCache(PagedCache(pool))}, TypeError, "pass it the PagedCache itself"),
    ],
    ids=["class", "pool", "use_cache", "two", "pair"],
)
def test_generate(given: Callable[[PagePool], Any], error: type[Exception], says: str, llama: Any) -> None:
    pool = make_pool(llama)
    with pytest.raises(error, match=re.escape(says)):
        llama.generate(**prompts([9, 4]), max_new_tokens=3, **given(pool))
    assert pool.stats().free == pool.num_blocks


@pytest.mark.parametrize("lengths", [[14, 14, 13], [14]])
def test_another_number_of_rows_on_a_cache_with_pads(lengths: list[int], llama: Any) -> None:
    cache = PagedCache(make_pool(llama))
    llama.generate(**prompts([9, 4]), max_new_tokens=2, **{CACHE: cache})
    says = rf"the cache holds 2 rows, but the model was called with {len(lengths)}: use cache\.batch_repeat_interleave"
    with pytest.raises(ValueError, match=says):
        llama.generate(**prompts(lengths, 3), max_new_tokens=2, **{CACHE: cache})
    assert cache.lengths == [10, 5]


def test_halves() -> None:
    pool = PagePool(ONE, num_blocks=4)
    for wrong in (None, pool):
        with pytest.raises(
            TypeError, match=rf"needs a PagedCache, got {type(wrong).__name__}: pass PagedCache\(pool\)"
        ):
            PagedEncoderDecoderCache(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a PagedCache, got PagePool"):
        PagedEncoderDecoderCache(PagedCache(pool), pool)  # type: ignore[arg-type]


def test_both_halves_come_back() -> None:
    config = BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, decoder_attention_heads=2, encoder_ffn_dim=32
    )
    model = BartForConditionalGeneration(config).eval()
    pool = make_pool(model)
    with torch.no_grad(), PagedEncoderDecoderCache(PagedCache(pool)) as cache:
        model(input_ids=prompts([9])["input_ids"], decoder_input_ids=prompts([5])["input_ids"], **{CACHE: cache})
        assert pool.stats().used == 3 + 2  # blocks of 4 for 9 and for 5 tokens
    assert pool.stats().used == 0
    with pytest.raises(RuntimeError, match="released"):
        cache.self_attention_cache.fork()
    cache.release()
