"""What a backend is: the contract's two functions, and what it can and cannot serve."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

WINDOW, SOFTCAP, SINKS = "window", "softcap", "sinks"  # what a layer may ask of a kernel beyond plain causal attention
FEATURES = frozenset({WINDOW, SOFTCAP, SINKS})


class Backend:
    """One way to compute the contract of `hf_paged.kernels`.

    Attributes:
        features: what it supports of `FEATURES`. It is never called for a layer that asks for more.
        block_size: the tokens per block that suit it best.
        needs_zeroed_frames: whether a NaN or an infinity in a slot at or beyond a row's length can reach its output.
    """

    features: frozenset[str] = FEATURES
    block_size: int = 16
    needs_zeroed_frames: bool = False

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """See `hf_paged.kernels`."""
        raise NotImplementedError

    def write(
        self, k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source: Tensor | None
    ) -> None:
        """See `hf_paged.kernels.reference.write`."""
        raise NotImplementedError

    def problem(
        self, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int
    ) -> str | None:
        """Why it cannot serve keys and values like these here, with the values that it could serve; None where it can."""
        raise NotImplementedError

    def storage_dims(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """The head dims that it stores for those of a model. The pool sets what lies beyond them to zero."""
        return key_dim, value_dim

    def describe(self) -> str:
        """What exactly it is, in a few words, where it can serve: a version, an instruction set."""
        return ""


class ModuleBackend(Backend):
    """A module of this package with the functions `attention`, `write` and `problem`.

    Such a kernel sizes its work by the tensors alone: it is not given what the contract ends with.
    """

    def __init__(self, module: ModuleType):
        self.module = module

    def attention(self, *arguments: object) -> Tensor:
        return self.module.attention(*arguments[:10])

    def write(self, *arguments: object) -> None:
        self.module.write(*arguments)

    def problem(
        self, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, block_size: int
    ) -> str | None:
        return self.module.problem(device, dtype, key_dim, value_dim, block_size)

    def describe(self) -> str:
        return self.module.describe() if hasattr(self.module, "describe") else ""
