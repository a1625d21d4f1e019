"""The prefix index by exact block ids: what is found, what is held, what goes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_paged import prefix
from hf_paged.blocks import UNUSED, BlockManager, IntegrityError, PoolExhausted
from hf_paged.layout import Group
from hf_paged.prefix import PrefixIndex
from hf_paged.tables import BlockTables

ROOT = b"model"


def tokens(*parts: tuple[int, int]) -> Any:
    """Runs of numbers: tokens((0, 8), (50, 4)) is 0..7, 50..53."""
    return np.concatenate([np.arange(start, start + count) for start, count in parts])


class Pool:
    """A manager with an index, and rows that are written, remembered and freed."""

    def __init__(self, num_blocks: int = 12, block_size: int = 4, windows: tuple[int, ...] = (0,)) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.windows = windows
        self.index = PrefixIndex(self.manager, [Group(window, []) for window in windows])

    def tables(self, rows: int = 1) -> list[BlockTables]:
        groups = [BlockTables(self.manager) for _ in self.windows]
        for group in groups:
            group.add_rows(rows)
        return groups

    def write(self, ids: Any, root: bytes = ROOT, keep: bool = False) -> list[BlockTables]:
        """One row of these tokens, remembered, and freed unless it is to be kept."""
        groups = self.tables()
        for group, window in zip(groups, self.windows):
            group.append([len(ids)])
            if window:
                group.slide([len(ids) - window + 1])
        self.index.insert(root, ids, 0, groups)
        self.manager.check_integrity()
        if not keep:
            for group in groups:
                group.free()
        return groups

    def hit(self, ids: Any, limit: int | None = None, root: bytes = ROOT) -> int:
        return self.index.match(root, ids, len(ids) - 1 if limit is None else limit).length

    def adopt(self, ids: Any, limit: int | None = None) -> list[BlockTables]:
        groups = self.tables()
        found = self.index.match(ROOT, ids, len(ids) - 1 if limit is None else limit)
        self.index.adopt(found, 0, found.length, groups)
        self.manager.check_integrity()
        return groups


def test_full_blocks_are_found_as_far_as_tokens_agree() -> None:
    pool = Pool()
    pool.write(tokens((0, 10)))
    assert (pool.manager.num_reserved, pool.manager.num_used) == (2, 0)  # the partial block is not kept
    assert pool.hit(tokens((0, 10))) == 8
    assert pool.hit(tokens((0, 30))) == 8
    assert pool.hit(tokens((0, 7), (99, 9))) == 4
    assert pool.hit(tokens((1, 30))) == 0
    assert pool.hit(tokens((4, 4))) == 0  # the same block, but not after the same tokens
    assert pool.hit(tokens((0, 30)), root=b"another model") == 0


def test_equal_blocks_after_different_ones_are_found_each() -> None:
    pool = Pool()
    for start in (0, 10):
        pool.write(tokens((start, 4), (50, 4)))
    assert [pool.hit(tokens((start, 4), (50, 8))) for start in (0, 10)] == [8, 8]


@pytest.mark.parametrize(("length", "found"), [(8, 7), (9, 8), (5, 4), (4, 3), (1, 0)])
def test_one_token_is_always_left_to_compute(length: int, found: int) -> None:
    pool = Pool()
    pool.write(tokens((0, 8)))
    assert pool.hit(tokens((0, length))) == found


def test_adoption_shares_frames_and_a_cut_block_is_copied_on_write() -> None:
    pool = Pool()
    pool.write(tokens((0, 8)))
    (row,) = pool.adopt(tokens((0, 8)))
    assert row.block_ids() == [[0, 1]] and row.lengths.tolist() == [7]
    assert (pool.manager.num_used, pool.manager.num_reserved, pool.manager.num_shared) == (2, 0, 0)
    append = row.append([1])
    assert append.copy_from.tolist() == [1] and row.block_ids() == [[0, 2]]
    assert pool.hit(tokens((0, 30))) == 8  # what is remembered was not written to


def test_hash_collisions_cost_a_miss_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "digest_of", lambda parent, block: b"same")
    pool = Pool()
    pool.write(tokens((0, 8)))
    pool.write(tokens((100, 8)))
    pool.write(tokens((0, 8)), root=b"other")
    assert pool.hit(tokens((100, 8))) == 0
    assert pool.hit(tokens((0, 4), (0, 5))) == 4  # block 0 twice: the second is another node
    assert pool.hit(tokens((0, 8)), root=b"other") == 0
    pool.manager.check_integrity()
    assert pool.index.clear() == 1


def test_a_block_is_kept_under_one_row_of_tokens() -> None:
    """Should anybody say that a row holds other tokens than it was said to hold, the first ones stay."""
    pool = Pool()
    row = pool.write(tokens((0, 12)), keep=True)
    pool.index.insert(ROOT, tokens((0, 4), (100, 8)), 0, row)
    pool.manager.check_integrity()
    assert pool.hit(tokens((0, 13))) == 12 and pool.hit(tokens((0, 4), (100, 9))) == 4
    for group in row:
        group.free()
    assert pool.index.clear() == 3 and pool.manager.num_used == 0
    pool.manager.check_integrity()


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = Pool()
    pool.write(tokens((0, 12)))  # frames 0, 1, 2
    pool.write(tokens((100, 12)))  # 3, 4, 5
    for group in pool.adopt(tokens((0, 9))):  # the first two blocks of the older row are used again
        group.free()
    evicted = []
    for _ in range(6):
        before = set(pool.index.held_frames().tolist())
        pool.index.give_back(1)
        evicted += before - set(pool.index.held_frames().tolist())
        pool.manager.check_integrity()
    assert evicted == [2, 5, 4, 3, 1, 0]
    assert not pool.index._nodes and not pool.index._roots and not pool.index._owner


def test_allocation_evicts_no_more_than_it_needs_and_never_a_live_block() -> None:
    pool = Pool(num_blocks=6)
    (live,) = pool.write(tokens((0, 8)), keep=True)  # 0, 1
    pool.write(tokens((100, 12)))  # 2, 3, 4
    row = BlockTables(pool.manager)
    row.add_rows(1)
    row.append([8])  # one free frame, one evicted
    assert pool.hit(tokens((100, 12))) == 8 and pool.manager.num_reserved == 2
    with pytest.raises(PoolExhausted) as caught:
        row.append([13])  # four blocks; two are reserved
    assert (caught.value.needed, caught.value.free, caught.value.used) == (4, 2, 4)
    assert pool.hit(tokens((100, 12))) == 8, "a shortage evicted something in vain"
    row.append([8])
    assert pool.manager.num_reserved == 0 and live.block_ids() == [[0, 1]]
    assert pool.hit(tokens((0, 8))) == 7  # live, and still found
    pool.manager.check_integrity()


def test_a_second_row_of_the_same_tokens_is_not_held_twice() -> None:
    pool = Pool()
    pool.write(tokens((0, 8)))
    pool.write(tokens((0, 12)))  # computed again, not adopted
    assert pool.manager.num_reserved == 3  # two of the first row, the last block of the second
    assert pool.hit(tokens((0, 20))) == 12


def test_a_tail_whose_head_was_evicted_is_found_again_with_a_new_head() -> None:
    pool = Pool()
    pool.write(tokens((0, 8)))
    (twin,) = pool.write(tokens((0, 12)), keep=True)  # holds its own frames for the first two blocks
    pool.index.give_back(2)
    assert pool.hit(tokens((0, 20))) == 0
    pool.index.insert(ROOT, tokens((0, 12)), 0, [twin])
    assert pool.hit(tokens((0, 20))) == 12
    pool.manager.check_integrity()


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_a_window_needs_only_what_it_can_see(window: int) -> None:
    """At 12 tokens the next query sees the last `window - 1` of them."""
    pool = Pool(num_blocks=20, windows=(0, window))
    pool.write(tokens((0, 12)))
    assert pool.hit(tokens((0, 20))) == 12
    assert pool.hit(tokens((0, 8), (77, 9))) == 0  # what is in the window there has left it here
    full, sliding = pool.adopt(tokens((0, 20)))
    first = max(0, 12 - max(window - 1, 1)) // 4
    assert full.starts.tolist() == [0] and sliding.starts.tolist() == [first]
    assert sliding.table[0, :first].tolist() == [UNUSED] * first


def test_windows_alone_keep_the_chain_of_what_has_left_them() -> None:
    """The hash of a block stands for all tokens before it, and these are compared too, though their frames are gone."""
    pool = Pool(windows=(4,))
    pool.write(tokens((0, 12)))
    assert pool.manager.num_reserved == 1
    assert pool.hit(tokens((0, 20))) == 12
    assert pool.hit(tokens((50, 8), (8, 12))) == 0
    assert len(pool.index._nodes) == 3
    pool.index.give_back(1)
    assert not pool.index._nodes, "nodes that lead nowhere were kept"


def test_growth_comes_after_eviction_and_stops_at_its_budget() -> None:
    manager = BlockManager(4, 4, max_blocks=9)
    index = PrefixIndex(manager, [Group(0, [])])
    rows = BlockTables(manager)
    rows.add_rows(1)
    rows.append([8])
    index.insert(ROOT, tokens((0, 8)), 0, [rows])
    rows.free()
    live = BlockTables(manager)
    live.add_rows(1)
    live.append([16])
    assert manager.num_blocks == 4 and manager.num_reserved == 0
    live.append([1])
    assert manager.num_blocks == 5 and live.block_ids()[0][-1] == 4
    with pytest.raises(PoolExhausted):
        live.append([20])
    assert manager.num_blocks == 5, "grown in vain"
    live.append([15])
    live.append([1])
    assert manager.num_blocks == 9
    manager.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda index, head, tail: index._owner.pop(tail.frames[0]), "its nodes have"),
        (lambda index, head, tail: index.held.__setitem__(tail.frames[0], False), "its nodes have"),
        (lambda index, head, tail: tail.frames.__setitem__(0, head.frames[0]), "its nodes have"),
        (lambda index, head, tail: index.manager.ref_counts.__setitem__(tail.frames[0], 0), "which are free"),
        (lambda index, head, tail: setattr(head, "children", 0), "counts 0 children, but has 1"),
        (lambda index, head, tail: setattr(tail, "tokens", b"others"), "another digest"),
        (lambda index, head, tail: index._roots.clear(), "another digest"),
        (lambda index, head, tail: index._drop_frame(tail), "holds nothing and leads to nothing"),
    ],
)
def test_check_integrity_finds(corrupt: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_frame(index: PrefixIndex, node: Any) -> None:
        """Forget the frame, but not the node."""
        frame = node.frames[0]
        del index._owner[frame]
        index.held[frame] = False
        node.frames[0] = UNUSED

    monkeypatch.setattr(PrefixIndex, "_drop_frame", drop_frame, raising=False)
    pool = Pool()
    pool.write(tokens((0, 8)))
    pool.index.check_integrity()
    head, tail = pool.index.match(ROOT, tokens((0, 8)), 8).nodes
    corrupt(pool.index, head, tail)
    with pytest.raises(IntegrityError, match=message):
        pool.index.check_integrity()
