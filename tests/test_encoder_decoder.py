"""Encoder-decoder models: one PagedCache for both halves, the encoder's keys shared by beams, cross-attention by kernels."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import architectures
import encoder_decoders
import pytest
import torch
from hf_paged.patches import encoder_decoder as patch
from test_padding import kernel_calls
from tiny import CACHE, default, make_pool, paged, poison
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_paged import LayerGeometry, PagedCache, PagedEncoderDecoderCache, PagePool, PoolExhausted
from hf_paged.attention import paged_attention
from hf_paged.compat import RELEASE
from hf_paged.lazy import LazyKV
from hf_paged.rows import which_row

LAYERS, WIDTH = 4, encoder_decoders.WIDTH
_models: dict[tuple[str, int], Any] = {}


def model_of(kind: str, seed: int = 2) -> Any:
    """A tiny model of four decoder layers, under "paged"."""
    if (kind, seed) not in _models:
        model = encoder_decoders.build(kind)
        initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        _models[kind, seed] = architectures.condition(model, initial, seed, 1.5)
    _models[kind, seed].set_attn_implementation("paged")
    return _models[kind, seed]


@pytest.fixture
def bart() -> Any:
    return model_of("bart")


def sources(rows: int, pads: int = 0, seed: int = 0, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Random sources; the first has `pads` pads at its end, or `-pads` at its start."""
    ids = torch.randint(3, 150, (rows, width), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    padded = slice(width - pads, None) if pads >= 0 else slice(-pads)
    ids[0, padded], mask[0, padded] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Every dense view of keys or values that is made: whether it is of cross-attention."""
    seen: list[bool] = []
    gathered = LazyKV.gathered
    monkeypatch.setattr(LazyKV, "gathered", lambda self: (seen.append(self.state.cross), gathered(self))[1])
    yield seen


# ------------------------------------------------------------------------------------------------- one cache is enough


@pytest.mark.parametrize("form", ["cache", "pair", "explicit"])
def test_cache_goes_in_and_comes_back(form: str, bart: Any) -> None:
    pool, inputs = make_pool(bart), sources(2, 5)
    cache, cross = PagedCache(pool), PagedCache(pool)
    given = {"cache": cache, "pair": EncoderDecoderCache(cache, cross), "explicit": PagedEncoderDecoderCache(cache)}[
        form
    ]
    out = bart.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True, **{CACHE: given})
    returned = getattr(out, CACHE)
    assert torch.equal(default(bart, inputs, max_new_tokens=8), out.sequences)
    assert isinstance(returned, EncoderDecoderCache) and returned.self_attention_cache is cache
    assert returned.cross_attention_cache is cache.cross_attention
    assert cache.lengths == [8, 8] and cache.cross_attention.lengths == [WIDTH, WIDTH]
    assert pool.stats().used == 2 * 2 + 2 * 6
    pool.check_integrity()
    cache.release()
    assert pool.stats().used == 0 and not any(returned.is_updated.values())
    assert "_prepare_cache_for_generation" not in vars(bart)


def test_dropped_cache_gives_both_halves_back(bart: Any) -> None:
    pool = make_pool(bart)
    bart.generate(**sources(2), max_new_tokens=4, **{CACHE: PagedCache(pool)})
    assert pool.stats().used == 0


def test_reset_is_seen_by_the_pair(bart: Any) -> None:
    """Another source on the same cache, by its old pair: nothing of the first source is left."""
    pool = make_pool(bart)
    with PagedCache(pool) as cache:
        pair = PagedEncoderDecoderCache(cache)
        for seed in (0, 1):
            cache.reset()
            inputs = sources(2, seed=seed)
            got = bart.generate(**inputs, max_new_tokens=6, **{CACHE: pair})
            assert torch.equal(default(bart, inputs, max_new_tokens=6), got)


@pytest.mark.skipif(RELEASE < (5, 10), reason="upstream does not slice a decoder prompt by its mask")
@pytest.mark.parametrize("through", ["cache", "returned"])
@pytest.mark.parametrize("cached", ["part", "all"])
def test_goes_on(through: str, cached: str, bart: Any) -> None:
    """A second call with the whole decoder ids computes the new ones only."""
    inputs, flags = sources(2, 5), dict(return_dict_in_generate=True)
    want = default(bart, inputs, max_new_tokens=10)
    with PagedCache(make_pool(bart)) as cache:
        first = bart.generate(**inputs, max_new_tokens=5, **flags, **{CACHE: cache})
        ids = first.sequences if cached == "part" else first.sequences[:, : cache.get_seq_length()]
        second = bart.generate(
            **inputs,
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            max_new_tokens=11 - ids.shape[1],
            **flags,
            **{CACHE: cache if through == "cache" else getattr(first, CACHE)},
        )
        assert cache.lengths == [10, 10] and cache.cross_attention.lengths == [WIDTH, WIDTH]
    assert torch.equal(want, second.sequences)


def test_forks(bart: Any) -> None:
    """Both halves are shared, and what one fork writes the other does not see."""
    inputs, pool = sources(2), make_pool(bart)
    start = torch.full((2, 3), 2)
    with PagedCache(pool) as cache, torch.no_grad():
        pair = PagedEncoderDecoderCache(cache)
        encoded = bart.get_encoder()(**inputs)
        bart(encoder_outputs=encoded, decoder_input_ids=start, **{CACHE: pair})
        used = pool.stats().used
        twins = [copy.deepcopy(pair), pair.fork(), PagedEncoderDecoderCache(cache.fork())]
        assert pool.stats().used == used
        for seed, twin in enumerate(twins):
            new = torch.randint(3, 90, (2, 2), generator=torch.Generator().manual_seed(seed))
            alone = bart(encoder_outputs=encoded, decoder_input_ids=torch.cat([start, new], 1)).logits[:, 3:]
            got = bart(encoder_outputs=encoded, decoder_input_ids=new, **{CACHE: twin}).logits
            torch.testing.assert_close(alone, got, rtol=1e-5, atol=1e-5)
            assert twin.self_attention_cache.cross_attention is twin.cross_attention_cache
        assert cache.lengths == [3, 3]
        twins.clear()
        assert cache.cross_attention.fork(3).lengths == [WIDTH] * 6
        twin = cache.fork(2)
        assert twin.lengths == [3] * 4 and twin.cross_attention.lengths == [WIDTH] * 4
        del twin, got
        assert pool.stats().used == used


def test_rows_of_both_halves_move_together(bart: Any) -> None:
    with PagedCache(make_pool(bart)) as cache, torch.no_grad():
        pair = PagedEncoderDecoderCache(cache)
        bart(**sources(3), decoder_input_ids=torch.tensor([[2, 5], [2, 6], [2, 7]]), **{CACHE: pair})
        halves = (cache, cache.cross_attention)
        before = [[layer.keys.dense().clone() for layer in half.layers] for half in halves]
        rows = torch.arange(3)
        for change, index in (
            (lambda: pair.reorder_cache(torch.tensor([2, 0, 0])), torch.tensor([2, 0, 0])),
            (lambda: pair.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
            (lambda: pair.batch_select_indices(torch.tensor([4, 1])), torch.tensor([4, 1])),
            (lambda: cache.select([1, 0, 1]), torch.tensor([1, 0, 1])),
        ):
            change()
            rows = rows[index]
            for half, old in zip(halves, before):
                for layer, keys in zip(half.layers, old):
                    assert torch.equal(layer.keys.dense(), keys[rows])
        pair.crop(-1)
        assert cache.lengths == [1, 1, 1] and cache.cross_attention.lengths == [WIDTH] * 3


def test_one_cache_for_both_halves_is_refused(bart: Any) -> None:
    cache = PagedCache(make_pool(bart))
    with pytest.raises(ValueError, match="a PagedCache each"):
        bart.generate(**sources(1), **{CACHE: EncoderDecoderCache(cache, cache)})


def test_patch(bart: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other caches and models are left alone; without the patch the pair still serves."""
    assert GenerationMixin.generate._hf_paged and patch.apply() is None  # type: ignore[attr-defined]
    for cache in (
        None,
        EncoderDecoderCache(PagedCache(make_pool(bart)), EncoderDecoderCache([]).cross_attention_cache),
    ):
        assert patch.paired(cache) is None
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate.__wrapped__)  # type: ignore[attr-defined]
    inputs, flags = sources(2, 5), dict(max_new_tokens=6, num_beams=2)
    with PagedCache(make_pool(bart)) as cache:
        got = bart.generate(**inputs, **flags, **{CACHE: PagedEncoderDecoderCache(cache)})
    assert torch.equal(default(bart, inputs, **flags), got)


# ---------------------------------------------------------------------------------------------- the encoder's keys once


@pytest.mark.parametrize(
    "flags", [dict(num_beams=8), dict(do_sample=True, num_return_sequences=8)], ids=["beams", "samples"]
)
def test_encoder_keys_are_stored_once(flags: dict[str, Any], bart: Any) -> None:
    """One source, eight rows: six blocks of four tokens for the 21 keys of the encoder, and one row in the prefill."""
    inputs, pool = sources(1), make_pool(bart)
    want = default(bart, inputs, max_new_tokens=8, return_dict_in_generate=True, **flags)
    with PagedCache(pool) as cache, kernel_calls(pool) as calls:
        torch.manual_seed(0)
        got = bart.generate(**inputs, max_new_tokens=8, **flags, **{CACHE: cache})
        tables = cache.cross_attention.block_tables
        assert len(tables[0]) == 6 and tables == [tables[0]] * 8
        assert pool.stats().used == 6 + len({block for table in cache.block_tables for block in table})
        for layer, other in zip(cache.cross_attention.layers, getattr(want, CACHE).cross_attention_cache.layers):
            torch.testing.assert_close(layer.keys.dense(), other.keys, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.values.dense(), other.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(want.sequences, got)
    assert calls == [(1, 1)] * 2 * LAYERS + [(8, 8)] * 7 * 2 * LAYERS, "self- and cross-attention, layer by layer"


def test_reorder_leaves_the_encoder_keys_alone(bart: Any) -> None:
    """Beams of one source exchange nothing there: its tables, and so the plan that the kernels read, stay as they are."""
    inputs, pool, versions = sources(2, 5), make_pool(bart), []
    with PagedCache(pool) as cache:
        pair = PagedEncoderDecoderCache(cache)
        reorder, moved = pair.reorder_cache, []

        def spy(beam_idx: torch.Tensor) -> None:
            reorder(beam_idx)
            state = cache.cross_attention._state
            versions.append((state.version, id(state.tables.table)))
            moved.append(beam_idx.tolist() != list(range(8)))

        pair.reorder_cache = spy  # type: ignore[method-assign]
        got = bart.generate(**inputs, max_new_tokens=12, num_beams=4, **{CACHE: pair})
        assert len(versions) == 12 and any(moved) and len(set(versions)) == 1
        assert pool.stats().used < 2 * 6 + 8 * 4
    assert torch.equal(default(bart, inputs, max_new_tokens=12, num_beams=4), got)


def test_only_equal_sources_are_shared(bart: Any) -> None:
    pool = make_pool(bart)

    def rows_computed(inputs: dict[str, torch.Tensor], **flags: Any) -> int:
        with kernel_calls(pool) as calls:
            got = paged(bart, inputs, pool, max_new_tokens=4, **flags)
        assert torch.equal(default(bart, inputs, max_new_tokens=4, **flags), got)
        return calls[0][0]

    repeated = {name: value[[0, 1, 0, 2, 1]] for name, value in sources(3, 5).items()}
    assert rows_computed(repeated) == 3
    assert rows_computed(repeated, num_beams=2) == 3
    assert rows_computed(sources(3, 5)) == 3, "equal decoder ids alone are not enough"
    masked = {name: value.repeat(2, 1) for name, value in sources(1).items()}
    masked["attention_mask"][1, -3:] = 0
    encoded = bart.get_encoder()(input_ids=masked["input_ids"])
    assert rows_computed(dict(encoder_outputs=encoded, attention_mask=masked["attention_mask"])) == 2
    assert rows_computed(dict(encoder_outputs=encoded, attention_mask=torch.ones_like(masked["attention_mask"]))) == 1
    decoder_ids = torch.tensor([[2, 5], [2, 6], [2, 5]])
    inputs = {name: value[[0, 0, 0]] for name, value in sources(1).items()}
    assert rows_computed(dict(inputs, decoder_input_ids=decoder_ids)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_which_row(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 0], [0, 1], [0, 0]]).to(dtype)
    assert which_row(rows) == [0, 0, 1, 0, 2, 1]
    assert which_row(rows[:, :0]) == [0] * 6
    if dtype.is_floating_point:
        nan = rows.clone()
        nan[[0, 1], 1], nan[5, 0] = float("nan"), -0.0
        assert which_row(nan) == [0, 0, 1, 2, 3, 4], "bits, not numbers"
    assert which_row(rows[:, 0].repeat(3, 1).T) == [0, 0, 1, 0, 1, 1], "strided"


# ------------------------------------------------------------------------------------------------------ cross-attention


@pytest.mark.parametrize("kind", ["bart", "t5", "whisper"])
def test_cross_attention_is_native(kind: str, gathers: list[bool]) -> None:
    """Nothing of the encoder's keys is gathered, without pads and with pads at a source's end; with pads elsewhere all is."""
    model = model_of(kind)
    for pads in (0, 5, -5):
        inputs = encoder_decoders.make_inputs(model, kind, 0) if kind == "whisper" else sources(2, pads)
        pool, flags = make_pool(model), dict(max_new_tokens=6, num_beams=2)
        gathers.clear()
        with kernel_calls(pool) as calls:
            got = paged(model, inputs, pool, **flags)
        assert torch.equal(default(model, inputs, **flags), got)
        dense = pads < 0 and kind != "whisper"
        dense |= kind == "t5" and RELEASE < (5, 20)  # its bias and its mask are one tensor there
        assert gathers.count(True) == (dense * 2 * LAYERS * 6)
        assert len(calls) == ((kind != "t5") + (not dense)) * LAYERS * 6, (
            "T5's self-attention has a bias, which no kernel takes"
        )


def everything(mask: torch.Tensor | None, q_length: int) -> torch.Tensor | None:
    return mask if mask is None else mask[:, None, None].expand(-1, 1, q_length, -1)


LEADING = torch.arange(11) < torch.tensor([[11], [7], [1]])
HOLES = torch.ones(3, 11, dtype=torch.bool)
HOLES[1, 4] = False
NOTHING = torch.arange(11) < torch.tensor([[11], [7], [0]])
BY_QUERY = LEADING[:, None, None].repeat(1, 1, 3, 1)
BY_QUERY[1, 0, 2, 6] = False


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("q_length", [1, 3])
@pytest.mark.parametrize(
    ("mask", "native"),
    [(None, True), (LEADING, True), (HOLES, False), (NOTHING, False), (BY_QUERY, False), ("soft", False)],
    ids=["none", "leading", "holes", "a row that sees nothing", "differs by query", "neither shown nor hidden"],
)
def test_against_dense_attention(mask: Any, native: bool, q_length: int, additive: bool, gathers: list[bool]) -> None:
    """Every kind of mask, several queries per row: what sdpa gives on the keys themselves; by a kernel where that can be."""
    if mask is BY_QUERY and q_length == 1:
        mask = None
        native = True
    generator = torch.Generator().manual_seed(0)
    pool = poison(PagePool([LayerGeometry(2, 8, 16)], num_blocks=20, block_size=4))
    keys, values = torch.randn(3, 2, 11, 8, generator=generator), torch.randn(3, 2, 11, 16, generator=generator)
    query = torch.randn(3, 4, q_length, 8, generator=generator)
    if isinstance(mask, str):
        full = -torch.rand(3, 1, q_length, 11, generator=generator)
    else:
        full = everything(mask, q_length) if mask is not BY_QUERY else mask
        if additive and full is not None:
            full = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    module.num_key_value_groups = 2  # type: ignore[assignment]
    want, _ = paged_attention(module, query, keys, values, full)
    with PagedCache(pool) as owner:
        cross = PagedEncoderDecoderCache(owner).cross_attention_cache
        for handles in (cross.update(keys, values, 0), (cross.layers[0].keys, cross.layers[0].values)):
            got, _ = paged_attention(module, query, *handles, full)
            shown = slice(2) if mask is NOTHING else slice(None)
            torch.testing.assert_close(want[shown], got[shown], rtol=1e-5, atol=1e-5)
            assert bool(gathers) is not native
        if "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
            return  # that of older releases takes none
        bias = torch.zeros(1, 4, q_length, 11)
        gathers.clear()
        paged_attention(module, query, *handles, full, position_bias=bias)
        assert bool(gathers) is not native
        bias = bias.index_fill(3, torch.tensor(3), 5)
        want, _ = paged_attention(module, query, keys, values, full, position_bias=bias)
        got, _ = paged_attention(module, query, *handles, full, position_bias=bias)
        torch.testing.assert_close(want[shown], got[shown], rtol=1e-5, atol=1e-5)


def test_decode_makes_no_temporary_of_the_size_of_the_encoder_keys(bart: Any) -> None:
    """A source of 200 tokens under 8 rows: no tensor made in a decode step is as large as one layer's keys of it."""

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in storages:
                self.bytes = max(self.bytes, out.untyped_storage().nbytes())
            return out

    inputs = {name: value.repeat(8, 1) for name, value in sources(1, width=200).items()}
    with PagedCache(make_pool(bart, 600)) as cache, torch.no_grad():
        pair, encoded = PagedEncoderDecoderCache(cache), bart.get_encoder()(**inputs)
        for _ in range(2):
            largest = Largest()
            with largest:
                bart(encoder_outputs=encoded, decoder_input_ids=torch.full((8, 1), 2), **{CACHE: pair})
    assert 0 < largest.bytes < 8 * 200 * 64 * 4 / 4


@pytest.mark.parametrize("turn", ["first", "second"])
def test_shortage_of_cross_attention_changes_nothing(turn: str, bart: Any) -> None:
    """The decoder's keys fit, the encoder's do not: both halves are as before, and a retry works."""
    pool, inputs = make_pool(bart, 40), sources(3)
    cache = PagedCache(pool)
    with PagedCache(pool) as hog, torch.no_grad():
        hog.update(torch.zeros(1, 4, 100, 16), torch.zeros(1, 4, 100, 16), 0)  # 25 blocks; 18 + 3 would be needed
        if turn == "second":
            cache.update(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16), 0)
            for layer in cache.layers[1:]:
                layer.update(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16))
        before = cache.lengths
        with pytest.raises(PoolExhausted, match="18 needed, 12 free"):
            bart(**inputs, decoder_input_ids=torch.full((3, 1), 2), **{CACHE: PagedEncoderDecoderCache(cache)})
        assert cache.lengths == before and all(layer.width == cache._state.width for layer in cache.layers)
        assert cache.cross_attention.lengths == []
        pool.check_integrity()
    if turn == "first":
        assert pool.stats().used == 0
        got = bart.generate(**inputs, max_new_tokens=4, **{CACHE: cache})
        assert torch.equal(default(bart, inputs, max_new_tokens=4), got)
    cache.release()
    assert pool.stats().used == 0


# ------------------------------------------------------------------------------------------------------------ rollback


@pytest.mark.parametrize("assistant", [3, 2], ids=["weak", "itself"])
@pytest.mark.parametrize("kind", ["bart", "t5", "whisper"])
def test_assisted_equals_greedy(kind: str, assistant: int) -> None:
    model = model_of(kind)
    inputs = {name: value[1:] for name, value in encoder_decoders.make_inputs(model, kind, 0).items()}
    want = default(model, inputs, max_new_tokens=24)
    helper = model_of(kind, assistant)
    if assistant == 2:
        helper = copy.deepcopy(helper)
    helper.set_attn_implementation("sdpa")
    got = paged(model, inputs, make_pool(model), max_new_tokens=24, assistant_model=helper)
    assert torch.equal(want, got)


def test_prompt_lookup_equals_greedy(bart: Any) -> None:
    flags = dict(max_new_tokens=24, eos_token_id=bart.config.vocab_size)  # prompt lookup of 5.0 cannot do without one
    want = default(bart, sources(1), **flags)
    assert torch.equal(want, paged(bart, sources(1), make_pool(bart), prompt_lookup_num_tokens=3, **flags))
