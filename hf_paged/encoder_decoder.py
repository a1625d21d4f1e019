"""A `PagedCache` as encoder-decoder models want it: self-attention and cross-attention in two halves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from .cache import PagedCache
from .layers import PagedLayer


class _Written(Mapping[int, bool]):
    """Which layers hold cross-attention keys. Read off the layers, so that no `reset` and no `release` is missed; what
    models note themselves is ignored."""

    def __init__(self, layers: list[PagedLayer]):
        self._layers = layers

    def __getitem__(self, index: int) -> bool:
        return self._layers[index].is_initialized

    def __setitem__(self, index: int, value: bool) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._layers)))

    def __len__(self) -> int:
        return len(self._layers)


class PagedEncoderDecoderCache(EncoderDecoderCache):
    """What an encoder-decoder model gets for a `PagedCache`; `generate` wraps one by itself, a plain forward pass needs it.

    The given cache is the self-attention half and owns the cross-attention half, `cache.cross_attention`, made at first
    use: releasing, resetting, forking the one or choosing its rows takes the other along, and cropping it does not.

    Args:
        cache: the self-attention half.
        cross: the cross-attention half, where it is to come from another pool.

    Raises `TypeError` for anything but a `PagedCache`.
    """

    def __init__(self, cache: PagedCache, cross: PagedCache | None = None):
        for half in (cache,) if cross is None else (cache, cross):
            if not isinstance(half, PagedCache):
                raise TypeError(
                    f"PagedEncoderDecoderCache needs a PagedCache, got {type(half).__name__}: pass PagedCache(pool)"
                )
        cross = cross or cache.cross_attention or PagedCache(cache.pool)
        cache.own(cross)
        self.self_attention_cache = cache
        self.cross_attention_cache = cross
        self.is_updated = _Written(self.cross_attention_cache.layers)

    @property
    def is_compileable(self) -> bool:
        """See `PagedCache.is_compileable`."""
        return False

    def fork(self, repeats: int = 1) -> PagedEncoderDecoderCache:
        """See `PagedCache.fork`."""
        return type(self)(self.self_attention_cache.fork(repeats))

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Models write to the halves. Raises `TypeError`."""
        raise TypeError("a model without an encoder got a PagedEncoderDecoderCache: pass it the PagedCache itself")

    def reset(self) -> None:
        """Give the blocks of both halves back and start over."""
        self.self_attention_cache.reset()

    def release(self) -> None:
        """Give the blocks of both halves back for good. Safe to call twice."""
        self.self_attention_cache.release()

    def __enter__(self) -> PagedEncoderDecoderCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows of both halves for beam search."""
        self.self_attention_cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times in a row, in both halves."""
        self.self_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in the given order, in both halves."""
        self.self_attention_cache.batch_select_indices(indices)

    def check_dynamic_cache(self, method: str) -> None:
        """Upstream allows `crop` to a pair of `DynamicCache` only; a `PagedCache` can be cropped too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedEncoderDecoderCache:
        return self.fork()

    def __copy__(self) -> PagedEncoderDecoderCache:
        return self.fork()
