"""Chunked attention: the right tokens are seen, by the kernel where chunks are whole blocks, and the others given back."""

from __future__ import annotations

import functools
from typing import Any

import architectures
import pytest
import torch
from tiny import CACHE, VOCAB, default, make_pool, paged, prompts

from hf_paged import LayerGeometry, PagedCache
from hf_paged.kernels import KERNELS
from hf_paged.layout import Group, groups_of

CHUNK = 8  # of Llama 4 in miniature, whose layers are chunked and full in turn


@functools.cache
def built() -> Any:
    model = architectures.build("llama4_text", False)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    architectures.condition(model, initial, seed=0, gain=1.5)
    model.set_attn_implementation("paged")
    return model


def test_groups() -> None:
    sliding = LayerGeometry(2, 16, 16, window=8)
    chunked = sliding._replace(chunked=True)
    assert groups_of([chunked] * 2) == [Group(8, [0, 1], True)]
    assert groups_of([chunked, sliding]) == [Group(8, [1]), Group(8, [0], True)]
    assert Group(8, [0], True).first_seen(torch.tensor([0, 7, 8, 15, 16]).numpy()).tolist() == [0, 0, 8, 8, 16]
    assert make_pool(built()).groups == [Group(0, [1, 3]), Group(CHUNK, [0, 2], True)]


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("flags", [{}, dict(num_beams=3), dict(prefill_chunk_size=7)])
def test_past_the_chunk(block_size: int, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts around the chunk, ragged and not. A block larger than a chunk takes the dense path, with the same tokens."""
    model, calls, kernel = built(), [], KERNELS["cpu"]

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args[4]))
        assert args[10:12] == (args[5].diff().max(), args[4].max()) and args[11] <= args[3].shape[1] * block_size
        return kernel(*args)

    monkeypatch.setitem(KERNELS, "cpu", counted)
    for lengths in ([8], [9], [5, 30, 16]):
        inputs = prompts(lengths)
        want = default(model, inputs, max_new_tokens=20, **flags)
        calls.clear()
        assert torch.equal(paged(model, inputs, make_pool(model, 300, block_size), max_new_tokens=20, **flags), want)
        if (
            len(lengths) == 3 and not flags
        ):  # the kernel sees each chunk of a prompt as a row, 1 + 4 + 2 of them, or none
            assert max(calls) == (7 if CHUNK % block_size == 0 else 3)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_what_was_given_back_is_never_read(kernel: str) -> None:
    """NaN in every free frame before each step: the logits are those of the default cache. What lies before the current chunk
    is free."""
    model = built()
    ids = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("sdpa")
    want = model(ids).logits.detach()
    model.set_attn_implementation("paged")
    pool = make_pool(model, 100, kernel=kernel)
    with torch.no_grad(), PagedCache(pool) as cache:
        parts = []
        for start, end in [(0, 11), (11, 12), (12, 30), *((i, i + 1) for i in range(30, 40))]:
            free = torch.from_numpy(pool.manager.ref_counts == 0)
            for storage in pool._storage:
                assert storage is not None
                storage.keys[free] = storage.values[free] = float("nan")
            parts.append(model(ids[:, start:end], **{CACHE: cache}).logits)
            pool.check_integrity()
            held = {group.chunked: tables for group, tables in zip(pool.groups, cache._state.groups)}
            first = max(min(start // CHUNK * CHUNK, start - 1), 0)  # the block of the last token stays
            assert held[True].starts.tolist() == [first // 4] * 2 and not held[False].starts.any()
        torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-4)


def test_crop_within_the_chunk() -> None:
    """The last pass can always be undone, also across the border of a chunk; what is gone is gone."""
    model = built()
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), PagedCache(make_pool(model, 100)) as cache:
        model(ids[:, :14], **{CACHE: cache})
        model(ids[:, 14:19], **{CACHE: cache})
        cache.crop(-5)
        got = model(ids[:, 14:20], **{CACHE: cache}).logits
        torch.testing.assert_close(got, model(ids[:, :20]).logits[:, 14:], rtol=1e-4, atol=1e-4)
        model(ids[:, 20:21], **{CACHE: cache})
        with pytest.raises(ValueError, match="cannot go back to 15 positions"):
            cache.crop(-6)
