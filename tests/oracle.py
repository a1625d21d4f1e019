"""Caches of one pool beside dense arrays of what they must hold.

What stands in a slot is a hash of the weights and of all tokens up to its own, as keys and values are a function of these.
So a block that is lost, shared by mistake, not copied before a write, remembered under other tokens than its own or adopted
by another prompt holds wrong numbers, whatever the counts say. Frames that nobody holds are filled with NaN after each step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from hf_paged import PagedCache, PagePool, PoolExhausted, reuse
from hf_paged.history import History
from hf_paged.pool import bytes_per_token
from hf_paged.prefix import Node
from hf_paged.reuse import Prompt
from hf_paged.state import Packing

ROOTS = [b"weights", b"other weights"]
PRIME = 2**47 - 115


def content(before: int, root: int, token: int) -> int:
    """What a token leaves in its slot, after a token that left `before`: an integer that float64 holds exactly."""
    return (before * 1_000_003 + root * 7_919 + int(token) * 104_729 + 12_345) % PRIME


class Mirror:
    """A cache, and what it must hold."""

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self.tokens = np.zeros((0, 0), np.int64)  # [B, W], 0 at pads
        self.values = np.zeros((0, 0))  # [B, W] contents, 0 at pads
        self.real = np.zeros((0, 0), bool)  # [B, W]
        self.root = 0  # the weights of the last turn
        self.shift = 0  # positions of the cache before those that `generate` was given ids for
        self.undo = 0  # to this width it can always be cropped

    def like(self, cache: PagedCache, rows: Any = slice(None)) -> Mirror:
        twin = Mirror(cache)
        vars(twin).update({**vars(self), "cache": cache})
        twin.select(rows)
        return twin

    def select(self, rows: Any) -> None:
        self.tokens, self.values, self.real = self.tokens[rows], self.values[rows], self.real[rows]

    def crop(self, width: int) -> None:
        self.tokens, self.values, self.real = self.tokens[:, :width], self.values[:, :width], self.real[:, :width]
        self.undo = min(self.undo, width)

    def clear(self) -> None:
        self.tokens, self.values, self.real = np.zeros((0, 0), np.int64), np.zeros((0, 0)), np.zeros((0, 0), bool)
        self.undo = 0

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def extended(self, tokens: Any, real: Any, root: int) -> Mirror:
        """What it holds after these new positions, [B, n] each."""
        after = self.like(self.cache)
        if not self.width:
            after.tokens, after.values, after.real = (np.zeros((len(tokens), 0), kind) for kind in (int, float, bool))
        values = np.zeros(tokens.shape)
        for row in range(len(tokens)):
            past = after.values[row][after.real[row]]
            last = int(past[-1]) if len(past) else 0
            for place in np.flatnonzero(real[row]):
                last = content(last, root, tokens[row, place])
                values[row, place] = last
        after.tokens = np.concatenate([after.tokens, np.where(real, tokens, 0)], 1)
        after.values = np.concatenate([after.values, values], 1)
        after.real = np.concatenate([after.real, real], 1)
        return after


class World:
    """A pool, its caches, and the model that fills them. `counts` tells how often each event happened."""

    def __init__(self, layers: list[Any], num_blocks: int, block_size: int, max_blocks: int, prefix_caching: bool):
        self.pool = PagePool(
            layers,
            num_blocks=num_blocks,
            max_memory=max_blocks * block_size * bytes_per_token(layers, torch.float64),
            block_size=block_size,
            dtype=torch.float64,
            kernel="reference",
            prefix_caching=prefix_caching,
        )
        self.size = block_size
        self.mirrors: dict[int, Mirror] = {}
        self.counts: Counter[str] = Counter()
        self.model = _Model(self)
        self._secret = len(ROOTS)
        self.root = 0  # the weights as they are now
        self._expected: dict[bytes, tuple[int, np.ndarray]] = {}  # by digest: the last content, and all of a block
        empty = torch.empty(1, 1, 0, 1, dtype=torch.float64)
        for layer in range(len(layers)):
            for tensor in self.pool.storage_for(layer, empty, empty)[:2]:
                tensor.fill_(torch.nan)

    # --------------------------------------------------------------------------------------------------- forward passes

    def secret(self) -> int:
        """A root of its own: for a pass whose keys and values are no function of the tokens that one knows."""
        self._secret += 1
        return self._secret

    def write(self, cache: PagedCache, values: Any, layers: int, read: bool) -> None:
        """The first `layers` layers of a forward pass: values [B, n]. `read`: a kernel reads what they store."""
        new = torch.from_numpy(np.ascontiguousarray(values))[:, None, :, None]  # [B, 1, n, 1]
        for layer in range(layers):
            handle = cache.update(new * 4 + layer, -(new * 4 + layer), layer)[0]
            if read:
                handle.plan.attended.add(handle.layer)

    def step(
        self,
        mirror: Mirror,
        tokens: Any,
        real: Any,
        root: int,
        told: bool = True,
        mask: Any = None,
        read: bool = True,
        layers: int | None = None,
    ) -> None:
        """A padded pass over tokens [B, n], as `generate` (`told`) or a user runs it. `mask` [B, W + n] is what the caller
        says, `real` by default. Raises what the cache raises, and the mirror is as before then."""
        cache, layers = mirror.cache, len(self.pool.layers) if layers is None else layers
        native = read and bool(real[:, -1].all()) and mask is None
        after = mirror.extended(tokens, real, root if native else self.secret())
        if told:
            fed = torch.from_numpy(tokens)
            cache._state.follow(torch.from_numpy(after.tokens[:, mirror.shift :]), fed)
        if mask is None and not after.real.all():
            mask = after.real
        cache._state.announce_mask(None if mask is None else torch.from_numpy(mask.astype(np.int64)), tokens.shape[1])
        width = mirror.width
        self.write(cache, after.values[:, width:], layers, native)
        if not cache._state.recording:
            after.undo = width
        vars(mirror).update(vars(after))

    def turn(self, mirror: Mirror, tokens: Any, real: Any, root: int, how: str, whole: bool, known: bool) -> None:
        """A prefill as the patch of `generate` runs it, packed, padded or in chunks; tokens [B, n] are new."""
        cache, state, fresh = mirror.cache, mirror.cache._state, not mirror.width
        self.root = root
        after = mirror.extended(tokens, real, root)
        ids = after.tokens if whole else after.tokens[:, mirror.width :]
        prompt = self.prompt(mirror, after, ids, root) if known else None
        if prompt is not None and fresh:
            reuse.compute_shared(self.model, prompt, None, dict(attention_mask=torch.ones(1), cache=cache), cache)
        state.history, state.prefilling = None if prompt is None else prompt.history, True
        mirror.root, mirror.shift = root, after.width - ids.shape[1]
        try:
            pack = None
            if how == "packed":
                pack = Packing(real, real) if prompt is None else reuse.adopt_packed(prompt, real, cache)
            if pack is not None and not pack.new.all():
                self.counts["packed"] += 1
                state.packing = pack
                try:
                    self.write(cache, after.values[:, mirror.width :][pack.new][None], len(self.pool.layers), True)
                finally:
                    state.packing = None
                if (pack.new != pack.real).any():  # what was taken over holds no more than its windows
                    after.undo = after.width
                elif not state.recording:
                    after.undo = mirror.width
                vars(mirror).update({**vars(after), "root": root, "shift": mirror.shift})
            else:
                if prompt is not None and fresh:
                    reuse.adopt_at_common_width(prompt, cache)
                    if state.width:
                        self.counts["adopted padded"] += 1
                        vars(mirror).update({**vars(after), "root": root, "shift": mirror.shift})
                        mirror.crop(state.width)
                        mirror.undo = mirror.width
                chunk = 3 if how == "chunks" else after.width
                for start in range(mirror.width, after.width, chunk):
                    columns = slice(start, start + chunk)
                    self.step(mirror, after.tokens[:, columns], after.real[:, columns], root)
        except BaseException:
            if fresh:
                cache.rewind(0)
                mirror.clear()
            raise
        finally:
            state.prefilling = False
        state.remember()

    def prompt(self, mirror: Mirror, after: Mirror, ids: Any, root: int) -> Prompt | None:
        """As `reuse.read` makes it."""
        whole = ids.shape[1] == after.width
        tokens = reuse._whole(ids, whole, after.real, ROOTS[root], mirror.cache._state)
        if tokens is None or not after.real[:, -1].all():
            return None
        rows = [row[keep] for row, keep in zip(tokens, after.real)]
        history = History(ROOTS[root], tokens, ids.shape[1])
        return Prompt(history, rows, [len(row) - 1 for row in rows], np.cumsum(after.real, 1), torch.device("cpu"))

    def attempt(self, action: Any) -> bool:
        """Run `action` and tell whether there was room. A shortage must be a real one."""
        try:
            action()
            return True
        except PoolExhausted as error:  # not pytest.raises: the traceback would keep caches alive
            needed, free, used, total = error.needed, error.free, error.used, error.num_blocks
        self.counts["exhausted"] += 1
        assert needed > free + self.pool.manager.max_blocks - total and used + free == total
        return False

    # ----------------------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Counts from scratch, then every content that a live cache or the prefix index holds."""
        self.pool.check_integrity()
        manager = self.pool.manager
        held = self.pool.prefixes.held.copy()
        for mirror in self.mirrors.values():
            for tables in mirror.cache._state.groups:
                held[tables.held_frames()] = True
        assert np.array_equal(held, manager.ref_counts > 0), "a frame is held by nobody that is alive"
        free = torch.from_numpy(~held)
        for storage in {id(storage): storage for storage in self.pool._storage}.values():
            storage.keys[free] = torch.nan
            storage.values[free] = torch.nan
        for mirror in self.mirrors.values():
            self.check_cache(mirror)
        self.check_index()

    def check_cache(self, mirror: Mirror) -> None:
        cache, state = mirror.cache, mirror.cache._state
        assert (state.width, cache.lengths) == (mirror.width, mirror.real.sum(1).tolist())
        token = np.cumsum(mirror.real, 1) - 1
        lengths = mirror.real.sum(1)
        for layer, (keys, values) in enumerate(cache):
            if not mirror.width:
                assert keys is None and values is None
                continue
            tables = state.groups[self.pool.group_of[layer]]
            window = state.group_of(layer).window
            first = np.maximum(lengths - window + 1, 0) if window else np.zeros_like(lengths)
            assert (tables.starts * self.size <= first).all(), "what a window still shows was given back"
            there = mirror.real & (token >= tables.starts[:, None] * self.size)
            want = np.where(there, mirror.values * 4 + layer, 0)
            assert np.array_equal(keys.dense().numpy()[:, 0, :, 0], want), f"keys of layer {layer}"
            assert np.array_equal(values.dense().numpy()[:, 0, :, 0], -want), f"values of layer {layer}"

    def check_index(self) -> None:
        """Every frame of the index holds what its tokens, after those of its parents, leave under its weights."""
        by_group: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        for frame, (node, group) in self.pool.prefixes._owner.items():
            frames, want = by_group.setdefault(group, ([], []))
            frames.append(frame)
            want.append(self.expected(node)[1])
        for group, (frames, want) in by_group.items():
            for layer in self.pool.groups[group].layers:
                storage = self.pool.storage(layer)
                block = np.array(want) * 4 + layer  # [frames, block_size]
                assert np.array_equal(storage.keys[frames].numpy()[:, :, 0, 0], block), "a prefix has other keys"
                assert np.array_equal(storage.values[frames].numpy()[:, :, 0, 0], -block), "a prefix has other values"

    def expected(self, node: Node) -> tuple[int, np.ndarray]:
        if node.parent is None:
            return 0, np.empty(0)
        if node.digest not in self._expected:
            top = node
            while top.parent is not None:
                top = top.parent
            last, root, block = self.expected(node.parent)[0], ROOTS.index(top.digest), []
            for token in np.frombuffer(node.tokens, np.int64):
                last = content(last, root, token)
                block.append(last)
            self._expected[node.digest] = last, np.array(block, float)
        return self._expected[node.digest]


class _Model:
    """What `reuse.compute_shared` prefills with."""

    device = torch.device("cpu")

    def __init__(self, world: World):
        self.world = world

    def _prefill(self, ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        world, tokens = self.world, ids.numpy()
        world.counts["shared beginnings"] += 1
        mirror = Mirror(model_kwargs["cache"])
        world.turn(mirror, tokens, np.ones(tokens.shape, bool), world.root, "padded", True, True)
