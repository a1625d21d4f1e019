"""The control plane, by exact block ids, slots and counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hf_paged.blocks import UNUSED, BlockManager, PoolExhausted
from hf_paged.tables import Append, BlockTables


def fill(manager: BlockManager, *lengths: int) -> BlockTables:
    """Tables with one row of each length."""
    tables = BlockTables(manager)
    tables.add_rows(len(lengths))
    tables.append(lengths)
    return tables


def free_list(manager: BlockManager) -> list[int]:
    """The free frames, the next one to be handed out last."""
    ids: list[int] = manager._free[: manager.num_free].tolist()
    return ids


def snapshot(manager: BlockManager, *all_tables: BlockTables) -> list[Any]:
    """All that a failed operation must leave alone, values and objects."""
    state: list[Any] = [manager.num_free, manager.peak_used, manager.cow_copies]
    state += [manager.ref_counts.tolist(), free_list(manager)]
    for tables in all_tables:
        state += [id(tables.table), tables.table.tolist(), id(tables.lengths), tables.lengths.tolist()]
    return state


def as_lists(append: Append) -> tuple[list[int], list[int], list[int]]:
    return append.slots.tolist(), append.copy_from.tolist(), append.copy_to.tolist()


def test_fresh_pool_hands_out_ids_in_ascending_order() -> None:
    manager = BlockManager(6, 4)
    first, nothing, rest = manager.allocate(3), manager.allocate(0), manager.allocate(3)
    assert (first.tolist(), nothing.tolist(), rest.tolist()) == ([0, 1, 2], [], [3, 4, 5])
    assert first.dtype == np.int32 and manager.ref_counts.tolist() == [1] * 6
    assert (manager.num_free, manager.num_used) == (0, 6)


def test_freed_frames_are_reused_last_in_first_out() -> None:
    """Within one call the lowest id comes first."""
    manager = BlockManager(6, 4)
    manager.allocate(6)
    for frames in ([1], [4], [2, 0]):
        manager.add_references(np.array(frames, np.int32), -1)
    assert free_list(manager) == [1, 4, 2, 0]
    assert manager.allocate(3).tolist() == [0, 2, 4]
    assert free_list(manager) == [1]


def test_one_call_may_change_the_count_of_a_frame_several_times() -> None:
    """What counts is the sum: a frame that loses and gains as much is not freed in between, one freed twice over
    enters the free list once."""
    manager = BlockManager(3, 4)
    frames = manager.allocate(3)
    manager.add_references(frames[[0, 0, 1, 2, 2]], [-1, 1, 2, 1, -2])
    assert manager.ref_counts.tolist() == [1, 3, 0] and free_list(manager) == [2]
    manager.add_references(frames[[1, 1, 1]], -1)
    assert manager.ref_counts.tolist() == [1, 0, 0] and free_list(manager) == [2, 1]


def test_used_shared_and_peak() -> None:
    """The peak stays when frames are given back; sharing does not raise it."""
    manager = BlockManager(8, 4)
    tables = fill(manager, 9, 4)
    assert (manager.num_used, manager.num_shared, manager.peak_used) == (4, 0, 4)
    twin = tables.fork()
    assert (manager.num_used, manager.num_shared, manager.peak_used) == (4, 4, 4)
    twin.append([1, 1])
    assert (manager.num_used, manager.num_shared, manager.peak_used) == (6, 3, 6)
    tables.free()
    assert (manager.num_used, manager.num_shared, manager.peak_used) == (5, 0, 6)
    twin.free()
    fill(manager, 1)
    assert (manager.num_used, manager.num_shared, manager.peak_used) == (1, 0, 6)


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (4, 0), (-1, 4), (4, -1), (2**31, 1)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    """Also more frames than an int32 can name, before any memory is taken for them."""
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks}"):
        BlockManager(num_blocks, block_size)


def test_pool_exhausted_says_how_much_and_survives_pickling() -> None:
    manager = BlockManager(5, 4)
    tables = fill(manager, 9)
    for error in (exhaust(tables, [16]), pickle.loads(pickle.dumps(exhaust(tables, [16])))):
        assert type(error) is PoolExhausted and isinstance(error, MemoryError)
        assert (error.needed, error.free, error.used, error.num_blocks) == (4, 2, 3, 5)
        assert "4 needed, 2 free of 5 (3 in use" in str(error)


def exhaust(tables: BlockTables, counts: list[int]) -> PoolExhausted:
    with pytest.raises(PoolExhausted) as caught:
        tables.append(counts)
    return caught.value


def test_append_crosses_block_boundaries() -> None:
    manager = BlockManager(9, 4)
    tables = BlockTables(manager)
    tables.add_rows(2)
    assert as_lists(tables.append([3, 5])) == ([0, 1, 2, 4, 5, 6, 7, 8], [], [])
    assert as_lists(tables.append([2, 0])) == ([3, 12], [], [])
    assert as_lists(tables.append([0, 9])) == ([9, 10, 11, 16, 17, 18, 19, 20, 21], [], [])
    assert tables.block_ids() == [[0, 3], [1, 2, 4, 5]] and tables.lengths.tolist() == [5, 14]
    assert manager.ref_counts.tolist() == [1] * 6 + [0] * 3


def test_append_of_nothing_takes_nothing() -> None:
    manager = BlockManager(3, 4)
    tables = fill(manager, 4, 0, 2)
    before = snapshot(manager)
    assert as_lists(tables.append([0, 0, 0])) == ([], [], [])
    assert as_lists(BlockTables(manager).append([])) == ([], [], [])
    assert snapshot(manager) == before and tables.block_ids() == [[0], [], [1]]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_no_row_ever_holds_a_block_too_many(block_size: int) -> None:
    """blocks == ceil(length / block_size) on the way up and down, and nothing valid beyond the last block."""
    manager = BlockManager(200, block_size)
    tables = BlockTables(manager)
    tables.add_rows(3)
    rng = np.random.default_rng(0)
    for step in range(60):
        change = rng.integers(0, 2 * block_size, 3)
        tables.append(change) if step % 3 < 2 else tables.crop(np.maximum(tables.lengths - change, 0))
        blocks = [-(-length // block_size) for length in tables.lengths.tolist()]
        assert manager.num_used == sum(blocks) and [len(ids) for ids in tables.block_ids()] == blocks
        assert all((row[count:] == UNUSED).all() for row, count in zip(tables.table, blocks))


def test_table_grows_geometrically() -> None:
    """A thousand decode steps move the table a few times, not a thousand."""
    tables = fill(BlockManager(1000, 1), 1)
    seen = [tables.table]
    for _ in range(999):
        tables.append([1])
        if tables.table is not seen[-1]:
            seen.append(tables.table)
    assert len(seen) < 20 and tables.block_ids() == [list(range(1000))]


def test_added_rows_come_last_and_hold_nothing() -> None:
    manager = BlockManager(5, 4)
    tables = fill(manager, 6)
    tables.add_rows(2)
    assert tables.num_rows == 3 and tables.block_ids() == [[0, 1], [], []] and (tables.table[1:] == UNUSED).all()
    assert as_lists(tables.append([1, 0, 2])) == ([6, 8, 9], [], [])
    tables.select([2, 0, 0])
    held, some = tables.held_frames(), tables.held_frames(np.array([2, 0]))
    assert (held.tolist(), some.tolist()) == ([2, 0, 1, 0, 1], [0, 1, 2])


def test_slots_are_64_bit() -> None:
    """A slot may lie beyond an int32 although the id of its frame does not."""
    slots = fill(BlockManager(4, 2**30), 1, 2, 3, 1).append([0, 0, 1, 1]).slots
    assert slots.dtype == np.int64 and slots.tolist() == [2 * 2**30 + 3, 3 * 2**30 + 1]


def test_slots_of_the_last_frames_that_int32_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(2, 16)
    last = np.iinfo(np.int32).max
    monkeypatch.setattr(manager, "allocate", lambda count: np.array([last, 2**27], np.int32)[:count])
    slots = fill(manager, 0).append([18]).slots
    assert slots.tolist() == [last * 16 + i for i in range(16)] + [2**31, 2**31 + 1]


def test_fork_shares_every_frame() -> None:
    """And so works in a full pool."""
    manager = BlockManager(3, 4)
    tables = fill(manager, 6, 1)
    twin = tables.fork(3)
    assert twin.block_ids() == [[0, 1]] * 3 + [[2]] * 3 and twin.lengths.tolist() == [6, 6, 6, 1, 1, 1]
    assert manager.ref_counts.tolist() == [4, 4, 4]
    tables.free()
    assert manager.ref_counts.tolist() == [3, 3, 3] and manager.num_free == 0
    manager.check_integrity()


def test_fork_is_independent_of_its_parent() -> None:
    """The write of one shows in the table of the other neither before nor after the copy."""
    manager = BlockManager(6, 4)
    tables = fill(manager, 6)
    twin = tables.fork()
    assert as_lists(twin.append([1])) == ([10], [1], [2])
    assert tables.block_ids() == [[0, 1]] and twin.block_ids() == [[0, 2]]
    assert as_lists(tables.append([3])) == ([6, 7, 12], [], [])
    twin.crop([2])
    assert tables.block_ids() == [[0, 1, 3]] and twin.block_ids() == [[0]]
    assert manager.ref_counts.tolist() == [2, 1, 0, 1, 0, 0]
    assert BlockTables(manager).fork(2).num_rows == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_last_holders_copy_a_shared_tail_once_less(rows: int) -> None:
    """All holders write: the first keeps the frame. A second write copies nothing more."""
    manager = BlockManager(8, 4)
    tables = fill(manager, 6)
    tables.select([0] * rows)
    copies = list(range(2, rows + 1))
    tails = [1, *copies]
    assert as_lists(tables.append([1] * rows)) == ([4 * tail + 2 for tail in tails], [1] * (rows - 1), copies)
    assert tables.block_ids() == [[0, tail] for tail in tails]
    assert manager.ref_counts.tolist() == [rows] + [1] * rows + [0] * (7 - rows)
    assert as_lists(tables.append([1] * rows)) == ([4 * tail + 3 for tail in tails], [], [])
    assert manager.cow_copies == rows - 1


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_every_writer_copies_when_somebody_else_reads_the_tail(rows: int) -> None:
    manager = BlockManager(8, 4)
    reader = fill(manager, 6)
    writers = reader.fork(rows)
    copies = list(range(2, rows + 2))
    assert as_lists(writers.append([1] * rows)) == ([4 * tail + 2 for tail in copies], [1] * rows, copies)
    assert reader.block_ids() == [[0, 1]] and writers.block_ids() == [[0, tail] for tail in copies]
    assert manager.ref_counts.tolist() == [rows + 1] + [1] * (rows + 1) + [0] * (6 - rows)
    assert manager.cow_copies == rows
    assert as_lists(reader.append([1])) == ([6], [], [])  # now it is alone


def test_rows_that_do_not_write_are_readers() -> None:
    manager = BlockManager(8, 4)
    tables = fill(manager, 2)
    tables.select([0, 0, 0])
    assert as_lists(tables.append([0, 1, 1])) == ([6, 10], [0, 0], [1, 2])
    assert tables.block_ids() == [[0], [1], [2]]
    tables.select([1, 1, 2])
    assert as_lists(tables.append([0, 1, 0])) == ([3], [1], [0])  # frame 0 had become free
    assert tables.block_ids() == [[1], [0], [2]]


def test_tails_are_told_apart_and_copies_come_before_growth() -> None:
    """Two tails in one call: rows 0 and 2 both write (and grow), row 1 writes and row 3 reads."""
    manager = BlockManager(12, 4)
    tables = fill(manager, 3, 5)  # [[0], [1, 2]]
    tables.select([0, 1, 0, 1])
    slots, copy_from, copy_to = as_lists(tables.append([2, 1, 2, 0]))
    assert (copy_from, copy_to) == ([2, 0], [3, 4])
    assert tables.block_ids() == [[0, 5], [1, 3], [4, 6], [1, 2]]
    assert slots == [3, 20, 13, 19, 24]
    assert manager.ref_counts.tolist() == [1, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]


def test_full_tail_is_not_copied() -> None:
    manager = BlockManager(4, 4)
    tables = fill(manager, 4)
    tables.select([0, 0])
    assert as_lists(tables.append([1, 1])) == ([4, 8], [], [])
    assert tables.block_ids() == [[0, 1], [0, 2]] and manager.cow_copies == 0


def test_crop_into_a_shared_block_makes_the_next_append_copy() -> None:
    """A row that still reads the frame to its end keeps it, also when it writes elsewhere in the same call."""
    manager = BlockManager(6, 4)
    tables = fill(manager, 8)
    tables.select([0, 0])
    tables.crop([8, 3])
    assert tables.block_ids() == [[0, 1], [0]] and manager.ref_counts.tolist() == [2, 1, 0, 0, 0, 0]
    assert as_lists(tables.append([1, 2])) == ([12, 11, 16], [0], [2])
    assert tables.block_ids() == [[0, 1, 3], [2, 4]] and manager.ref_counts.tolist() == [1] * 5 + [0]


@pytest.mark.parametrize(
    "rows, counts, free",
    [
        ([2, 1, 0], [1, 1, 1, 1, 1], [5]),
        ([2, 2, 0, 2], [1, 1, 0, 3, 3], [5, 2]),
        ([1, 1, 1, 1], [0, 0, 4, 0, 0], [5, 4, 3, 1, 0]),
        ([2], [0, 0, 0, 1, 1], [5, 2, 1, 0]),
        ([], [0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]),
    ],
)
def test_select_moves_rows_and_counts_them(rows: list[int], counts: list[int], free: list[int]) -> None:
    """Every frame counts as many rows as chose it."""
    manager = BlockManager(6, 4)
    tables = fill(manager, 5, 1, 8)
    ids, lengths = tables.block_ids(), tables.lengths.tolist()
    assert ids == [[0, 1], [2], [3, 4]]
    assert tables.select(rows) is True
    assert tables.block_ids() == [ids[row] for row in rows]
    assert tables.lengths.tolist() == [lengths[row] for row in rows]
    assert manager.ref_counts.tolist() == [*counts, 0] and free_list(manager) == free
    manager.check_integrity()


def test_select_frees_nothing_that_another_row_still_holds() -> None:
    """Row 0 leaves and row 1, which shares its frames, is doubled, in a pool without a free frame."""
    manager = BlockManager(3, 4)
    tables = fill(manager, 8)
    tables.select([0, 0])
    tables.append([1, 0])
    assert tables.block_ids() == [[0, 1, 2], [0, 1]] and manager.num_free == 0
    tables.select([1, 1])
    assert manager.ref_counts.tolist() == [2, 2, 0] and free_list(manager) == [2]


@pytest.mark.parametrize("identity", [[0, 1, 2], np.arange(3, dtype=np.int32), range(3)])
def test_identity_writes_nothing(identity: Any) -> None:
    manager = BlockManager(6, 4)
    tables = fill(manager, 5, 1, 8)
    tables.table.flags.writeable = manager.ref_counts.flags.writeable = False
    before = snapshot(manager, tables)
    assert tables.select(identity) is False and BlockTables(manager).select([]) is False
    assert snapshot(manager, tables) == before


def test_crop_releases_the_frames_that_fall_off() -> None:
    manager = BlockManager(8, 4)
    tables = fill(manager, 9, 8, 3)
    keep = np.array([4, 5, 3])
    tables.crop(keep)
    keep[:] = 0  # the caller's array is not ours
    assert tables.block_ids() == [[0], [3, 4], [5]] and tables.lengths.tolist() == [4, 5, 3]
    assert (tables.table[0, 1:] == UNUSED).all() and free_list(manager) == [7, 6, 2, 1]
    twin = tables.fork()
    tables.crop([0, 4, 0])
    assert tables.block_ids() == [[], [3], []] and manager.ref_counts.tolist() == [1, 0, 0, 2, 1, 1, 0, 0]
    twin.crop([0, 0, 0])
    assert manager.ref_counts.tolist() == [0, 0, 0, 1, 0, 0, 0, 0] and free_list(manager) == [7, 6, 2, 1, 5, 4, 0]


@pytest.mark.parametrize(
    "method, arguments, error, message",
    [
        (BlockTables.append, [[1], [1, 1, 1], [1, -1], [[1, 1]], 1], ValueError, "one count >= 0 for each of 2 rows"),
        (BlockTables.select, [[0, 2], [-1, 0], [[0, 1]], 0], IndexError, "the cache has 2"),
        (BlockTables.crop, [[6, 2], [5, -1], [5], [[5, 2]]], ValueError, "cannot crop rows of"),
    ],
)
def test_arguments_that_do_not_fit_change_nothing(
    method: Callable[..., object], arguments: list[Any], error: type[Exception], message: str
) -> None:
    manager = BlockManager(8, 4)
    tables = fill(manager, 5, 2)
    before = snapshot(manager, tables)
    for argument in arguments:
        with pytest.raises(error, match=message):
            method(tables, argument)
        assert snapshot(manager, tables) == before


def test_free_twice_and_start_over() -> None:
    manager = BlockManager(4, 4)
    tables = fill(manager, 5, 2)
    twin = tables.fork()
    for _ in range(2):
        tables.free()
        assert manager.ref_counts.tolist() == [1, 1, 1, 0] and (tables.num_rows, tables.block_ids()) == (0, [])
    twin.free()
    twin.free()
    assert free_list(manager) == [3, 2, 1, 0]
    tables.add_rows(1)
    assert as_lists(tables.append([2])) == ([0, 1], [], [])


def test_every_step_frees_what_was_abandoned_first() -> None:
    """So an append sees that a dead cache no longer reads its tail."""
    tables = fill(BlockManager(1, 4), 2)
    manager = tables.manager
    manager.abandon(tables.fork())
    assert as_lists(tables.append([1])) == ([2], [], [])
    for step in (manager.collect, manager.check_integrity, lambda: manager.allocate(0)):
        manager.abandon(tables)
        step()
        assert manager.num_free == 1
        tables.add_rows(1)
        tables.append([1])


@pytest.mark.parametrize("counts, needed", [([0, 0, 0, 9], 3), ([1, 1, 1, 0], 2), ([3, 3, 3, 1], 6), ([5, 0, 1, 0], 3)])
def test_shortage_changes_nothing(counts: list[int], needed: int) -> None:
    """Growth only, copies only, both, and copies because of a reader. With one frame more it works."""
    manager = BlockManager(12, 4)
    tables = fill(manager, 6, 8)
    tables.select([0, 0, 0, 1])
    hog = fill(manager, 4 * (9 - needed))
    before = snapshot(manager, tables, hog)
    error = exhaust(tables, counts)
    assert (error.needed, error.free, error.used) == (needed, needed - 1, 13 - needed)
    assert snapshot(manager, tables, hog) == before
    hog.crop(hog.lengths - 4)
    tables.append(counts)
    assert (tables.lengths - counts).tolist() == [6, 6, 6, 8] and manager.num_free == 0
    manager.check_integrity()
