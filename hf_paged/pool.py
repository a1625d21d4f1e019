"""PagePool: the memory that all caches of a model draw on. Budget, storage of every layer, statistics."""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .blocks import BlockManager, Int32
from .device_plan import send
from .kernels.backend import SINKS, SOFTCAP, WINDOW
from .kernels.choose import choose, substitute
from .layout import READS_PADS, LayerGeometry, OwnLayer, groups_of, layers_of, makes_sliding_masks, needs_of
from .prefix import PrefixIndex

logger = logging.getLogger(__name__)


class LayerStorage(NamedTuple):
    """Keys and values of one layer, on that layer's device. A slot that no row uses may hold anything, also NaN. Both may
    be views of wider tensors, with zeros behind the last number of a head."""

    keys: Tensor  # [max_blocks, block_size, H_kv, D_k]
    values: Tensor  # [max_blocks, block_size, H_kv, D_v]
    kernel: str  # name of the backend that serves it


class PoolStats(NamedTuple):
    """Blocks at one moment. `free + used + cached == num_blocks`."""

    num_blocks: int
    block_size: int  # tokens
    free: int
    used: int  # held by live rows
    cached: int  # held by the prefix index only
    shared: int  # held by more than one live row
    peak_used: int  # the largest `used` since the pool was made
    bytes_per_block: int  # keys and values, all layers of a group
    cow_copies: int  # blocks copied on write so far
    prefix_hit_tokens: int  # tokens adopted from the prefix index so far


class PagePool:
    """Blocks for the keys and values of one model, shared by any number of caches.

    Storage is allocated layer by layer, on the device of the first keys that arrive.
    Use `PagePool.for_model`; this constructor is for models whose config does not tell the geometry.

    Args:
        layers: one `LayerGeometry` per layer, or an `OwnLayer` for one that is not paged. Where none is, the caches of
            this pool hold transformers' own layers only, and take no block.
        num_blocks: the size of the pool, `num_blocks * block_size` tokens.
        memory: the size in bytes instead, or as text ("4GiB", "500 MB"). Default: a quarter of the memory of the machine
            or container, or half of what is free on the GPU.
        max_memory: a second budget, up to which the pool grows before `PoolExhausted` is raised. CPUs only, where memory is
            taken when it is first written to.
        block_size: tokens per block; None leaves it to the kernel.
        dtype: of keys and values.
        device: where the kernel is to run. Layers may live elsewhere, those then use the reference kernel.
        kernel: "auto", or a name in `hf_paged.kernels.BACKENDS`.
        needs: what the model asks of a kernel, of `hf_paged.kernels.FEATURES`. Windows are known from the layers.
        prefix_caching: keep the full blocks of released caches, until the space is needed, for later prompts that start
            alike. Sharing inside one batch does not need it.

    Raises `ValueError` for sizes, dtypes and shapes that cannot be, for a budget that holds no block or is below what the
    pool starts with, for `memory` together with `num_blocks`, and for a kernel that is unknown or cannot serve; `TypeError`
    for layers that are none.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry | OwnLayer],
        *,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        max_memory: int | str | None = None,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernel: str | None = None,
        needs: Collection[str] = (),
        prefix_caching: bool = True,
    ):
        if memory is not None and num_blocks is not None:
            raise ValueError(f"memory={memory!r} and num_blocks={num_blocks} both set the size: give one of them")
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("layers is empty: give one LayerGeometry or OwnLayer per layer of the model")
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, (LayerGeometry, OwnLayer)):
                raise TypeError(
                    f"layers[{index}] is {layer!r}: give a list of LayerGeometry or OwnLayer, one per layer"
                )
            if isinstance(layer, LayerGeometry) and min(layer[:3]) < 1:
                raise ValueError(f"layers[{index}] is {layer}: kv_heads, key_dim and value_dim must be at least 1")
        for name, value in dict(num_blocks=num_blocks, block_size=block_size).items():
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if value is not None and not (whole and value >= 1):
                raise ValueError(f"{name}={value!r} must be an int of at least 1")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype!r} must be a floating-point dtype of torch, such as torch.bfloat16")
        self.geometry = [layer for layer in self.layers if isinstance(layer, LayerGeometry)]
        self.groups = groups_of(self.layers)
        self.group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.dtype = dtype
        self.device = torch.device(device)
        dims = [(layer.key_dim, layer.value_dim) for layer in self.geometry]
        needs = {*needs, WINDOW} if any(layer.window for layer in self.geometry) else set(needs)
        self.kernel, block_size, self.kernel_reason = choose(kernel, block_size, self.device, dtype, dims, needs)
        self._bytes_per_token = bytes_per_token(self._stored(self.kernel), dtype)
        if num_blocks is None:
            budget = default_budget(self.device) if memory is None else parse_bytes(memory)
            per_block = self._bytes_per_token * block_size
            num_blocks = budget // per_block if per_block else 1  # nothing is paged: one block for the form
            if num_blocks < 1:
                raise ValueError(
                    f"memory={memory!r} holds no block: one block of {block_size} tokens takes {per_block} bytes in this model"
                )
        max_blocks = None
        if max_memory is not None:
            if self.device.type != "cpu":
                raise ValueError(
                    f"max_memory={max_memory!r}: a pool on {self.device} is allocated whole and cannot grow, set memory instead"
                )
            max_blocks = parse_bytes(max_memory, "max_memory") // max(1, self._bytes_per_token * block_size)
            if max_blocks < num_blocks:
                raise ValueError(
                    f"max_memory={max_memory!r} holds {max_blocks} blocks, but the pool starts with {num_blocks}: give more, "
                    "or a smaller memory or num_blocks"
                )
        self.manager = BlockManager(num_blocks, block_size, max_blocks)
        self.prefixes = PrefixIndex(self.manager, self.groups)
        self.prefix_caching = prefix_caching
        self.masks_slide = True  # whether masks hide what has left a window; see layout.makes_sliding_masks
        self.stores_pads = False  # whether pads are stored and computed as in the default cache; see layout.READS_PADS
        self._storage: list[LayerStorage | None] = [None] * len(self.layers)
        self._storage_lock = threading.Lock()
        self._process = os.getpid()

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        memory: int | str | None = None,
        num_blocks: int | None = None,
        max_memory: int | str | None = None,
        block_size: int | None = None,
        kernel: str | None = None,
        prefix_caching: bool = True,
        dtype: torch.dtype | None = None,
    ) -> PagePool:
        """A pool that fits `model`.

        Args:
            model: a transformers model, or anything with `.config`, `.dtype` and `.device`.
            memory, num_blocks, max_memory, block_size, kernel, prefix_caching: see `PagePool`.
            dtype: of keys and values; the model's by default. Set it when the model runs under autocast.

        Runs the model once, on one token, to learn the shapes of its keys and values.

        Raises `TypeError` for anything but a model, and what `PagePool` raises.
        """
        if not all(hasattr(model, name) for name in ("config", "dtype", "device")):
            raise TypeError(
                f"for_model needs a model, got {model if isinstance(model, (str, type)) else type(model)!r}: load one with "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        pool = cls(
            layers_of(model),
            num_blocks=num_blocks,
            memory=memory,
            max_memory=max_memory,
            block_size=block_size,
            dtype=dtype or model.dtype,
            device=model.device,
            kernel=kernel,
            needs=needs_of(model),
            prefix_caching=prefix_caching,
        )
        pool.masks_slide = not any(group.window for group in pool.groups) or makes_sliding_masks(model)
        pool.stores_pads = model.config.get_text_config(decoder=True).model_type in READS_PADS
        logger.info("%r for %s: kernel=%s, %s", pool, type(model).__name__, pool.kernel, pool.kernel_reason)
        return pool

    @property
    def num_blocks(self) -> int:
        return self.manager.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.manager.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of keys and values that one block takes in all layers of a group together."""
        return self._bytes_per_token * self.block_size

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the pool."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise `RuntimeError` in a process that was forked from the one that made the pool."""
        if self.forked:
            raise RuntimeError(
                f"this pool belongs to process {self._process}, and this is process {os.getpid()}: what a fork inherits of it "
                "must not be used, its locks and its kernel's threads stayed behind. Make a pool in this process"
            )

    def kernel_for(self, layer: int, window: int, softcap: float, sinks: Tensor | None) -> str:
        """The backend that computes the attention of a layer which asks for these: the one of its storage, or where that
        lacks a feature another one that can read the same storage."""
        storage = self.storage(layer)
        asked = {WINDOW: window > 0, SOFTCAP: softcap > 0, SINKS: sinks is not None}
        needs = frozenset(feature for feature, value in asked.items() if value)
        if not needs:
            return storage.kernel
        dims = (storage.keys.shape[-1], storage.values.shape[-1])
        return substitute(storage.kernel, needs, storage.keys.device, self.dtype, dims, self.block_size)

    def _stored(self, kernel: str) -> list[LayerGeometry | OwnLayer]:
        """The layers with the head dims that a backend stores."""
        stored: list[LayerGeometry | OwnLayer] = []
        for layer in self.layers:
            if isinstance(layer, LayerGeometry):
                key_dim, value_dim = kernels.BACKENDS[kernel].storage_dims(layer.key_dim, layer.value_dim)
                layer = layer._replace(key_dim=key_dim, value_dim=value_dim)
            stored.append(layer)
        return stored

    # ----------------------------------------------------------------------------------------------------- the data

    def storage(self, layer: int) -> LayerStorage:
        """The tensors of a layer that was written to before."""
        storage = self._storage[layer]
        if storage is None:
            raise RuntimeError(f"layer {layer} holds nothing yet")
        return storage

    def storage_for(self, layer: int, key: Tensor, value: Tensor) -> LayerStorage:
        """The tensors of `layer` for new keys [B, H_kv, n, D_k] and values [B, H_kv, n, D_v], allocated at first use.
        Raises `ValueError` when shape, dtype or device are not those of the pool."""
        storage = self._storage[layer]
        arrived = LayerGeometry(key.shape[1], key.shape[3], value.shape[3])
        expected = self.layers[layer]
        if arrived[:3] != expected[:3]:
            raise ValueError(
                f"layer {layer} delivers {arrived}, but the pool was made for {expected}: make the pool with "
                "PagePool.for_model(this_model), or with PagePool([LayerGeometry(...), ...]) if its config does not tell"
            )
        if key.dtype != self.dtype or value.dtype != self.dtype:
            raise ValueError(
                f"layer {layer} delivers {key.dtype} keys and {value.dtype} values, but the pool stores {self.dtype}: make the "
                f"pool with dtype={key.dtype}"
            )
        if storage is None:
            with self._storage_lock:
                storage = self._storage[layer] or self._share(layer, key.device) or self._allocate(layer, key.device)
                self._storage[layer] = storage
        if key.device != storage.keys.device:
            raise ValueError(
                f"layer {layer} delivers keys on {key.device}, but its blocks are on {storage.keys.device}: make a new pool "
                "after the model has moved"
            )
        return storage

    def _share(self, layer: int, device: torch.device) -> LayerStorage | None:
        """The storage of the layer at the same place of another group, if it is there: a frame is theirs in turn."""
        place = self.groups[self.group_of[layer]].layers.index(layer)
        for group in self.groups:
            storage = self._storage[group.layers[place]] if place < len(group.layers) else None
            if storage is not None and storage.keys.device == device:
                return storage
        return None

    def _allocate(self, layer: int, device: torch.device) -> LayerStorage:
        geometry = self.layers[layer]
        assert isinstance(geometry, LayerGeometry)
        heads, dims = geometry.kv_heads, (geometry.key_dim, geometry.value_dim)
        kernel = self.kernel if device.type == self.device.type else "reference"
        backend = kernels.BACKENDS[kernel]
        widths = backend.storage_dims(*dims)
        make = torch.zeros if backend.needs_zeroed_frames or widths != dims else torch.empty
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written to outside
            keys, values = (
                make(self.manager.max_blocks, self.block_size, heads, width, dtype=self.dtype, device=device)[..., :dim]
                for dim, width in zip(dims, widths)
            )
        if kernel == "cpu":
            for tensor in (keys, values):
                kernels.cpu.advise_huge_pages(tensor)
        return LayerStorage(keys, values, kernel)

    def copy_blocks(self, copy_from: Int32, copy_to: Int32) -> None:
        """Copy whole frames in every layer."""
        if not len(copy_from):
            return
        frames = copy_from.astype(np.int64), copy_to.astype(np.int64)
        on: dict[torch.device, list[Tensor]] = {}
        for storage in {id(storage): storage for storage in self._storage if storage is not None}.values():
            for tensor in storage[:2]:
                if tensor.device not in on:
                    on[tensor.device] = send(frames, tensor.device)
                source, target = on[tensor.device]
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    # ------------------------------------------------------------------------------------------------------ reports

    def stats(self) -> PoolStats:
        """Where the blocks are now."""
        self.check_process()
        manager = self.manager
        with manager.lock:
            manager.collect()
            return PoolStats(
                num_blocks=manager.num_blocks,
                block_size=manager.block_size,
                free=manager.num_free,
                used=manager.num_used,
                cached=manager.num_reserved,
                shared=manager.num_shared,
                peak_used=manager.peak_used,
                bytes_per_block=self.bytes_per_block,
                cow_copies=manager.cow_copies,
                prefix_hit_tokens=self.prefixes.hit_tokens,
            )

    def check_integrity(self) -> None:
        """Recompute all counts from the live caches, and walk the prefix index. Raises `hf_paged.IntegrityError` at the first
        contradiction."""
        self.check_process()
        with self.manager.lock:
            self.manager.check_integrity()
            self.prefixes.check_integrity()

    def clear_prefix_cache(self) -> int:
        """Give back all blocks that only the prefix index holds. Returns their number."""
        self.check_process()
        return self.prefixes.clear()

    def __repr__(self) -> str:
        size = self.num_blocks * self.bytes_per_block / 2**20
        dtype = str(self.dtype).removeprefix("torch.")
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return (
            f"PagePool({self.num_blocks} blocks of {self.block_size} tokens, {len(self.geometry)} layers{groups}, {dtype}, "
            f"{size:.1f} MiB, kernel={self.kernel})"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a PagePool cannot be pickled or copied: it owns memory. Make one per process with for_model")


def bytes_per_token(layers: Sequence[LayerGeometry | OwnLayer], dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take in the largest group of layers."""

    def size(index: int) -> int:
        layer = layers[index]
        return layer.kv_heads * (layer.key_dim + layer.value_dim) if isinstance(layer, LayerGeometry) else 0

    return max(sum(size(index) for index in group.layers) for group in groups_of(layers)) * dtype.itemsize


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(memory: int | str, name: str = "memory") -> int:
    """Bytes from a number, or from text like "4GiB", "1.5 GB", "512MiB". Raises `ValueError`, which calls it `name`."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", str(memory).lower())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except (ValueError, KeyError):
        raise ValueError(f"{name}={memory!r} is not a size: give bytes, or text like '4GiB' or '500MB'") from None


# Where a container finds its own limit: bytes, "max" in version 2 where there is none, more than any machine has in version 1.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def default_budget(device: torch.device) -> int:
    """Half of the free memory of a GPU, otherwise a quarter of the memory of the machine, or of the container, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return 4 * 2**30
    for file in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(file.read_text()))
    return memory // 4
