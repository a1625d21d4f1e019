"""The prefix index: which full blocks hold the keys and values of which tokens, so that a later prompt that starts alike
takes them over instead of computing them. numpy only, no torch, no model.

A block's keys and values depend on its tokens and on all tokens before them. So blocks form a tree: a node stands for one
block of tokens after the blocks of its parent, and is found by a hash of its tokens chained with its parent's hash (as in
vLLM's automatic prefix caching). What a hash finds is compared token by token, so a collision costs a miss, never a wrong
answer. A root stands for all else that keys and values depend on: the model, its weights, a salt.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .blocks import UNUSED, BlockManager, Int32, Int64, IntegrityError
from .tables import BlockTables


class Node:
    """One block of tokens after those of its parent, and the frames that hold it. A root has no parent and no frames."""

    __slots__ = ("children", "digest", "frames", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes = b"", parent: Node | None = None, groups: int = 0):
        self.digest, self.tokens, self.parent = digest, tokens, parent
        self.frames = [UNUSED] * groups  # per layer group; UNUSED where it left a window or was evicted
        self.children = 0


class Retention(Protocol):
    """What the layers of a group keep of a row."""

    @property
    def window(self) -> int:
        """0: all tokens."""

    def first_seen(self, lengths: Int64) -> Int64:
        """The first token that a query behind each of these numbers of tokens may see."""


class Match(NamedTuple):
    """The longest known beginning of a row."""

    nodes: list[Node]  # one per block
    length: int  # tokens that can be adopted


def digest_of(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a block's tokens after a parent's hash, 128 bits."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class PrefixIndex:
    """Finds blocks by their tokens, and holds them until somebody needs the space.

    A hit needs all blocks of the layer groups that look back all the way, and those within reach of its end of the others.

    The least recently used block goes first, of those used together the last in its row: a block never goes before what
    can only be found through it. Blocks that live rows hold too never go. All methods take the manager's lock.
    """

    def __init__(self, manager: BlockManager, groups: Sequence[Retention]):
        self.manager = manager
        self._groups = list(groups)
        self.hit_tokens = 0
        self.held: NDArray[np.bool_] = np.zeros(manager.max_blocks, np.bool_)
        self._rank: Int64 = np.zeros(manager.max_blocks, np.int64)  # the lowest goes first
        self._clock = 0
        self._owner: dict[int, tuple[Node, int]] = {}  # of a frame: the node and the group
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[bytes, Node] = {}  # all others, by digest
        manager.add_holder(self)
        manager.reserve = self

    def held_frames(self) -> Int32:
        return np.flatnonzero(self.held).astype(np.int32)

    # -------------------------------------------------------------------------------------------------------- finding

    def match(self, root: bytes, tokens: Int64, limit: int) -> Match:
        """The longest known beginning of `tokens`, at most `limit` of them. Valid as long as the lock is held."""
        with self.manager.lock:
            nodes: list[Node] = []
            parent = self._roots.get(root)
            for block in self.blocks(tokens[: self._blocks_for(limit) * self.manager.block_size]):
                node = None if parent is None else self._child(parent, block)
                if node is None or any(f == UNUSED for f, group in zip(node.frames, self._groups) if not group.window):
                    break
                nodes.append(node)
                parent = node
            return Match(nodes, self.fit(nodes, limit))

    def _child(self, parent: Node, block: bytes) -> Node | None:
        """The node of `block` after `parent`, if there is one. Never that of other tokens whose hash is the same."""
        node = self._nodes.get(digest_of(parent.digest, block))
        return node if node is not None and node.parent is parent and node.tokens == block else None

    def fit(self, nodes: list[Node], limit: int) -> int:
        """The largest number of tokens <= `limit` at which every window finds what it looks back to."""
        run = np.zeros(len(self._groups), np.int64)  # per group, blocks in a row that are there
        best = 0
        for blocks, node in enumerate(nodes[: self._blocks_for(limit)], 1):
            run = np.where(np.array(node.frames) == UNUSED, 0, run + 1)
            length = min(blocks * self.manager.block_size, limit)
            if all(run[group] >= blocks - self._first(length, group) for group in range(len(run))):
                best = length
        return best

    def adopt(self, match: Match, row: int, length: int, groups: Sequence[BlockTables]) -> None:
        """Let the empty row `row` of each group's tables hold the first `length` tokens of the match."""
        with self.manager.lock, self.manager:
            nodes = match.nodes[: self._blocks_for(length)]
            for group, tables in enumerate(groups):
                first = self._first(length, group)
                frames = np.array([node.frames[group] for node in nodes[first:]], np.int32)
                tables.adopt(row, frames, first, length)
            self._touch(nodes)
            self.hit_tokens += length

    def _first(self, length: int, group: int) -> int:
        """The first block that a row of `length` tokens keeps in a group: what its next query sees, and its last token."""
        if not self._groups[group].window:
            return 0
        first = int(self._groups[group].first_seen(np.array([length]))[0])
        return max(0, min(first, length - 1)) // self.manager.block_size

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.manager.block_size)

    def blocks(self, tokens: Int64) -> list[bytes]:
        """The tokens of every full block."""
        size = self.manager.block_size
        full = np.ascontiguousarray(tokens[: len(tokens) // size * size], np.int64)
        return [block.tobytes() for block in full.reshape(-1, size)]

    # -------------------------------------------------------------------------------------------------------- keeping

    def insert(self, root: bytes, tokens: Int64, row: int, groups: Sequence[BlockTables]) -> None:
        """Remember the full blocks of `row` in each group's tables. `tokens` [n] are the first ones of the row."""
        with self.manager.lock, self.manager:
            nodes: list[Node] = []
            parent = self._roots.setdefault(root, Node(root))
            for index, block in enumerate(self.blocks(tokens)):
                node = self._child(parent, block)
                if node is None:
                    digest = digest_of(parent.digest, block)
                    if digest in self._nodes:  # a collision: the first one stays
                        break
                    node = self._nodes[digest] = Node(digest, block, parent, len(groups))
                    parent.children += 1
                for group, tables in enumerate(groups):
                    if node.frames[group] == UNUSED and index >= tables.starts[row]:
                        self._hold(node, group, int(tables.table[row, index]))
                nodes.append(node)
                parent = node
            self._touch(nodes)
            self._prune(parent)

    def _hold(self, node: Node, group: int, frame: int) -> None:
        if self.held[frame]:  # under other tokens: what it holds is in doubt, and the first ones stay
            return
        node.frames[group] = frame
        self.held[frame] = True
        self._owner[frame] = node, group
        self.manager.add_references(np.array([frame], np.int32), 1)

    def _touch(self, nodes: list[Node]) -> None:
        """Note that `nodes`, a chain from a root on, were used now."""
        if not nodes:
            return
        self._clock += 1
        frames = np.array([node.frames for node in nodes], np.int64)  # [blocks, groups]
        rank = np.broadcast_to((self._clock << 32) - np.arange(len(nodes))[:, None], frames.shape)
        self._rank[frames[frames != UNUSED]] = rank[frames != UNUSED]

    # ------------------------------------------------------------------------------------------------------ forgetting

    def give_back(self, count: int) -> None:
        """Evict `count` frames that nobody else holds, or all of these if they are fewer."""
        with self.manager.lock, self.manager:
            idle = np.flatnonzero(self.held & (self.manager.ref_counts == 1))
            if count < len(idle):
                idle = idle[np.argpartition(self._rank[idle], count)[:count]] if count > 0 else idle[:0]
            self._drop(idle)

    def clear(self) -> int:
        """Forget everything. Returns the number of blocks that are free by that."""
        with self.manager.lock, self.manager:
            before = self.manager.num_free
            self._drop(np.flatnonzero(self.held))
            return self.manager.num_free - before

    def _drop(self, frames: Int64) -> None:
        for frame in frames.tolist():
            node, group = self._owner.pop(frame)
            node.frames[group] = UNUSED
            self._prune(node)
        self.held[frames] = False
        self.manager.add_references(frames.astype(np.int32), -1)

    def _prune(self, node: Node | None) -> None:
        """Forget a node that holds nothing and leads to nothing, and its parents likewise."""
        while node is not None and not node.children and all(frame == UNUSED for frame in node.frames):
            del (self._nodes if node.parent else self._roots)[node.digest]
            node = node.parent
            if node is not None:
                node.children -= 1

    # --------------------------------------------------------------------------------------------------------- checks

    def _owners(self) -> dict[int, tuple[Node, int]]:
        """Of every frame that a node holds: the node and the group. What the nodes say is what counts."""
        return {
            frame: (node, group)
            for node in self._nodes.values()
            for group, frame in enumerate(node.frames)
            if frame != UNUSED
        }

    def recover(self) -> None:
        """Be whole again after a change that was interrupted anywhere: all else is taken from the nodes."""
        self._owner = self._owners()
        self.held[:] = False
        self.held[list(self._owner)] = True
        children = Counter(id(node.parent) for node in self._nodes.values())
        nodes = [*self._roots.values(), *self._nodes.values()]
        for node in nodes:
            node.children = children[id(node)]
        for node in nodes:
            if (self._nodes if node.parent else self._roots).get(node.digest) is node:
                self._prune(node)

    def check_integrity(self) -> None:
        """Walk the whole tree. Raises `IntegrityError` at the first contradiction."""
        with self.manager.lock:
            owner = self._owners()
            held = self.held_frames().tolist()
            if owner != self._owner or sorted(owner) != held or sum(map(_count, self._nodes.values())) != len(held):
                raise IntegrityError(f"the prefix index holds frames {held}, but its nodes have {sorted(owner)}")
            idle = [frame for frame in held if self.manager.ref_counts[frame] < 1]
            if idle:
                raise IntegrityError(f"the prefix index holds frames {idle}, which are free")
            children = Counter(id(node.parent) for node in self._nodes.values())
            for digest, node in [*self._roots.items(), *self._nodes.items()]:
                if node.children != children[id(node)]:
                    raise IntegrityError(f"a prefix counts {node.children} children, but has {children[id(node)]}")
                if not node.children and not _count(node):
                    raise IntegrityError("a prefix holds nothing and leads to nothing")
                if node.parent is None:
                    known = self._roots.get(digest) is node and digest == node.digest
                else:
                    known = digest == node.digest == digest_of(node.parent.digest, node.tokens)
                    siblings = self._nodes if node.parent.parent else self._roots
                    known = known and siblings.get(node.parent.digest) is node.parent
                if not known:
                    raise IntegrityError("a prefix is filed under another digest than that of its tokens")


def _count(node: Node) -> int:
    """The frames that a node holds."""
    return sum(frame != UNUSED for frame in node.frames)
