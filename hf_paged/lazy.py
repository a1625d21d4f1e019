"""The key/value handle that `update` returns: it looks like the dense tensor, and becomes it only when touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from .plan import StepPlan
    from .state import CacheState


class LazyTensor(torch.Tensor):
    """A tensor whose contents are made the first time an operation reads them.

    Attention that knows about blocks takes what it needs from the attributes and never reads. Every other consumer
    gets the right numbers without knowing. In-place operations are refused: they would be lost.
    """

    # No Python detour for `.shape` and the like.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _dense: Tensor | None

    def make(self) -> Tensor:
        """The contents, with the shape, dtype, device and strides that this tensor advertises."""
        raise NotImplementedError

    def dense(self) -> Tensor:
        """The contents as an ordinary tensor, made once."""
        if self._dense is None:
            self._dense = self.make()
        return self._dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and any(isinstance(arg, LazyTensor) for arg in args[:1]):
            raise RuntimeError(
                f"{func} would change a {args[0].__class__.__name__} of a PagedCache in place, and the change would be lost: "
                "use the operation that returns a new tensor"
            )
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def numpy(self, *, force: bool = False) -> Any:
        return self.dense().numpy(force=force)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


class LazyKV(LazyTensor):
    """Keys or values of one layer, `[B, H_kv, width, D]` as transformers sees them, in blocks underneath.

    Valid until the cache changes; after that a read raises instead of returning other tokens.
    """

    state: CacheState
    plan: StepPlan
    layer: int
    blocks: Tensor  # [num_blocks, block_size, H_kv, D]

    @staticmethod
    def __new__(cls, state: CacheState, plan: StepPlan, layer: int, blocks: Tensor) -> LazyKV:
        _, _, heads, dim = blocks.shape
        batch, width = plan.shape
        self: LazyKV = torch.Tensor._make_wrapper_subclass(
            cls,
            (batch, heads, width, dim),  # contiguous, as the default cache's keys are: some models call .view() on them
            dtype=blocks.dtype,
            device=blocks.device,
        )
        self.state, self.plan, self.layer, self.blocks = state, plan, layer, blocks
        self._state_version = state.version
        self._dense = None
        return self

    _state_version: int

    @property
    def current(self) -> bool:
        """Whether the cache still exists and is what it was when this handle was made."""
        return self._state_version == self.state.version and not self.state.abandoned

    def make(self) -> Tensor:
        """See `gathered`. Raises `RuntimeError` where the reader's mask would show it tokens that are gone."""
        pool = self.state.pool
        group = self.state.group_of(self.layer)
        if not pool.masks_slide and self.plan.left_window(self.blocks.device, group) is not None:
            raise RuntimeError(
                f"layer {self.layer} keeps a window of {group.window} tokens, but this model's masks show all of them: run it "
                'with attn_implementation="paged", which hides what is gone'
            )
        return self.gathered()

    def gathered(self) -> Tensor:
        """The tokens at their padded positions; pads, and tokens that left the window, are zero."""
        if not self.current:
            raise RuntimeError(
                f"these keys or values of layer {self.layer} were read after their PagedCache had changed or was dropped: read "
                f"cache.layers[{self.layer}].keys again, or take .clone() before the change"
            )
        index, pads = self.plan.dense_index(self.blocks.device, self.state.pool.group_of[self.layer])
        heads, dim = self.blocks.shape[2:]
        tokens = self.blocks.view(-1, heads, dim)[index].view(self.plan.rows, -1, heads, dim)  # [B, width, H_kv, D]
        if pads is not None:
            tokens.masked_fill_(pads[:, :, None, None], 0)
        return tokens.transpose(1, 2).contiguous()


class LazyMask(LazyTensor):
    """The 4-D mask `[B, 1, q_length, width]` that sdpa (bool) or eager attention (additive) would get, with the pattern it was
    made from."""

    window: int | None
    chunk_size: int
    state: CacheState

    @staticmethod
    def __new__(
        cls,
        state: CacheState,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: Any,
        window: int | None,
        chunk_size: int,
        make: Callable[[], Tensor],
    ) -> LazyMask:
        """`window`: 0 for plain causal, the width of a sliding window in tokens, None for a pattern unknown to us.
        `chunk_size`: the tokens of a chunk where attention is causal and stays within chunks, else 0."""
        self: LazyMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.state, self.window, self.chunk_size = state, window, chunk_size
        self._make, self._dense = make, None
        return self

    _make: Callable[[], Tensor]

    def make(self) -> Tensor:
        return self._make().contiguous()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A copy on another device, as the hooks of a `device_map` make it before a layer, is a mask of the same pattern."""
        mask, options = args[0] if args else None, kwargs or {}
        if func is torch.ops.aten._to_copy.default and options.get("device") and isinstance(mask, LazyMask):
            device = options["device"]
            if options.get("dtype", mask.dtype) == mask.dtype:
                make = lambda: mask.dense().to(device)  # noqa: E731
                shape: Any = tuple(mask.shape)
                return LazyMask(mask.state, shape, mask.dtype, device, mask.window, mask.chunk_size, make)
        return super().__torch_dispatch__(func, types, args, kwargs)
