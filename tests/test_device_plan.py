"""The plan on a device that has memory of its own. A CPU is made one here, and on "meta" any read of a number raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import CACHE, default, make_pool, paged, prompts
from torch import Tensor

from hf_paged import LayerGeometry, PagedCache, PagePool, device_plan
from hf_paged.plan import StepPlan
from hf_paged.tables import BlockTables

CPU = torch.device("cpu")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on the CPU is a device to which everything is sent. Returns the bytes of each transfer."""
    sizes: list[int] = []

    def transfer(buffer: Tensor, device: torch.device) -> Tensor:
        sizes.append(buffer.nbytes)
        return buffer.clone()

    monkeypatch.setattr(device_plan, "HOST_MEMORY", set())
    monkeypatch.setattr(device_plan, "transfer", transfer)
    return sizes


def new_tokens(rows: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1, count, 8), torch.randn(rows, 1, count, 8)


def step(cache: PagedCache, rows: int, count: int, mask: Tensor | None = None) -> None:
    """A forward pass, and what the device holds then."""
    state = cache._state
    state.announce_mask(mask, count)
    for layer in range(2):
        cache.update(*new_tokens(rows, count), layer)
    plan = state.plan
    assert plan is not None
    for group, tables in enumerate(state.groups):
        there, columns = plan.on(CPU, group), int(tables.manager.blocks_for(tables.lengths).max())
        assert there.block_table.numpy().tolist() == np.maximum(tables.table[:, :columns], 0).tolist()
        assert there.seq_lens.tolist() == tables.lengths.tolist() == there.cu_seqlens_k.diff().tolist()
        assert there.cu_seqlens_k[0] == 0 and there.max_seqlen_k == tables.lengths.max()
        new = np.ones((rows, count), bool) if mask is None else mask[:, -count:].bool().numpy()
        assert there.cu_seqlens_q.tolist() == [0, *np.cumsum(new.sum(1)).tolist()]
        assert there.max_seqlen_q == new.sum(1).max()
        assert (there.source is None and new.all()) or there.source.tolist() == np.flatnonzero(new).tolist()
        last = [  # of each new token: its number in its row
            (row, int(length) - int(n) + i)
            for row, (length, n) in enumerate(zip(tables.lengths, new.sum(1)))
            for i in range(int(n))
        ]
        size = tables.manager.block_size
        assert there.slots.tolist() == [int(tables.table[row, i // size]) * size + i % size for row, i in last]
        for tensor in (there.slots, there.seq_lens, there.cu_seqlens_q, there.cu_seqlens_k, there.block_table):
            assert tensor.data_ptr() % 16 == 0  # what Triton looks at


@pytest.mark.parametrize("seed", range(6))
def test_contents_after_random_operations(sent: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = PagePool([LayerGeometry(1, 8, 8), LayerGeometry(1, 8, 8, window=6)], num_blocks=3000, block_size=2)
    caches = [PagedCache(pool)]
    for _ in range(80):
        cache = caches[int(random.integers(len(caches)))]
        rows, width = cache.num_rows, cache.get_seq_length()
        what = random.choice(["step"] * 6 + ["chunk", "select", "crop", "fork", "join", "reset"])
        if what == "fork" and rows and len(caches) < 4:
            caches.append(cache.fork(int(random.integers(1, 3))))
        elif what == "join" and rows and len(caches) < 4:
            caches.append(PagedCache.join([other for other in caches if other.num_rows]))
        elif what == "select" and rows:
            cache.select(random.integers(0, rows, int(random.integers(1, 9))))
        elif what == "crop" and width > 1:
            with contextlib.suppress(ValueError):  # what left a window is gone
                cache.crop(-1)
        elif what == "reset":
            cache.reset()
        else:
            rows, count = rows or int(random.integers(1, 9)), 1 if what == "step" else int(random.integers(1, 40))
            mask = None
            if random.random() < 0.5 or cache._state.real is not None:
                past = cache.attention_mask if width else torch.zeros(rows, 0, dtype=torch.long)
                new = torch.from_numpy(random.integers(0, 2, (rows, count)))
                new[:, -1] = 1
                mask = torch.cat([past, new], 1)
            step(cache, rows, count, mask)
    pool.check_integrity()


def test_a_decode_step_sends_what_changed(sent: list[int]) -> None:
    rows, blocks = 64, 512
    pool = PagePool([LayerGeometry(1, 8, 8)] * 2, num_blocks=rows * (blocks + 8), block_size=16)
    cache = PagedCache(pool)
    step(cache, rows, blocks * 16 - 8)
    assert sent.pop() > rows * blocks * 4
    tables = cache._state.on_devices[CPU]._tables
    for _ in range(30):
        sent.clear()
        step(cache, rows, 1)
        # Of each row its slot, its length and two sums; where a block begins, its place and its id.
        assert len(sent) == 1 and sent[0] <= rows * (8 + 4 + 4 + 4 + 8 + 4) + 64
        assert cache._state.on_devices[CPU]._tables is tables  # there was room
        cache.select(np.arange(rows))
    sent.clear()
    swapped = np.r_[1, 0, 2:rows]
    cache.select(swapped)
    step(cache, rows, 1)
    assert 2 * blocks * 12 <= sent[0] <= 2 * (blocks + 2) * 12 + rows * 20 + 64  # two rows of the table


def test_another_stream_gets_tables_of_its_own(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(PagePool([LayerGeometry(1, 8, 8)] * 2, num_blocks=100, block_size=2))
    step(cache, 2, 6)
    first = cache._state.on_devices[CPU]._tables
    before = first.clone()
    monkeypatch.setattr(device_plan, "current_stream", lambda device: "another")
    step(cache, 2, 2)
    assert torch.equal(first, before) and cache._state.on_devices[CPU]._tables is not first
    cache.release()
    assert not cache._state.on_devices


@pytest.mark.parametrize(("fails", "past"), [("transfer", 6), ("index_copy_", 30), ("copy_", 2)])
def test_what_failed_is_sent_again(fails: str, past: int, sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for a transfer: what the device holds is known still, and the next one brings the rest."""
    pool = PagePool([LayerGeometry(1, 8, 8)] * 2, num_blocks=100, block_size=2)
    cache, other = PagedCache(pool), PagedCache(pool)
    step(cache, 2, past)
    on_device = cache._state.on_devices[CPU]

    def fail(*args: object) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(device_plan, "HOST_MEMORY", set())
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_plan if fails == "transfer" else Tensor, fails, fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(cache, 2, 6)
    state = cache._state
    assert state.plan is not None and on_device is state.on_devices[CPU]
    again = state.plan.on(CPU).block_table  # what a second try would read
    assert again.tolist() == state.tables.table[:, : again.shape[1]].tolist() and again.shape[1] == (past + 6) // 2
    cache.reset()
    assert not state.on_devices
    step(other, 1, 7)  # takes frames that the cache had
    step(cache, 2, 6)


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("mps", True), ("xpu", True)])
def test_only_pinned_memory_is_left_to_itself(device: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the buffer may be gone before a transfer that nobody waits for has read it."""
    options: list[bool] = []
    monkeypatch.setattr(Tensor, "to", lambda self, device, non_blocking=False: options.append(non_blocking))
    device_plan.transfer(torch.zeros(1), torch.device(device))
    assert options == [not waits]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_generate(kind: str, model_of: Callable[[str], Any], sent: list[int]) -> None:
    model, inputs = model_of(kind), prompts([9, 5, 9])
    for flags in ({}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=3)):
        want = default(model, inputs, "eager", max_new_tokens=12, **flags)
        assert torch.equal(want, paged(model, inputs, make_pool(model), max_new_tokens=12, **flags))
    assert sent


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_forward(llama: Any, sent: list[int]) -> None:
    inputs = prompts([9, 5])
    want = default(llama, inputs, max_new_tokens=6)
    llama.forward = torch.compile(llama.forward, backend="eager")
    try:
        assert torch.equal(want, paged(llama, inputs, make_pool(llama), max_new_tokens=6))
    finally:
        del llama.forward
        torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@torch.no_grad()
def test_no_number_is_read_from_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta" every read raises: `.item()`, `.cpu()`, `nonzero`. So a pass reads nothing, but its mask once."""
    model = tiny.build(kind)
    pool_options = dict(num_blocks=200, block_size=4, kernel="reference")
    pool = PagePool.for_model(model, **pool_options)
    pool = PagePool(pool.layers, device="meta", **pool_options)
    model.to("meta")
    attended, reads = [], []
    original = StepPlan.on
    monkeypatch.setattr(StepPlan, "on", lambda *args: attended.append(1) or original(*args))
    mask = prompts([20, 9])["attention_mask"]
    monkeypatch.setattr(Tensor, "cpu", lambda self: reads.append(self.shape) or mask.bool() if self.is_meta else self)
    cache = PagedCache(pool)
    for new in (20, 1, 1):
        ids = torch.zeros(2, new, dtype=torch.long, device="meta")
        out = model(ids, attention_mask=mask, position_ids=ids, **{CACHE: cache})
        assert out.logits.device.type == "meta"
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    assert reads == [(2, 20), (2, 21), (2, 22)]
    assert len(attended) == 3 * 2 * len(pool.geometry)  # each layer writes and attends, none falls back
    assert cache._state.plan is not None and cache._state.plan.served(len(pool.geometry))
    cache.reorder_cache(torch.tensor([1, 1]))
    mask = mask[[1, 1]]
    model(ids, attention_mask=mask, position_ids=ids, **{CACHE: cache})
    cache.reset()
    reads.clear()
    for new in (20, 1, 1):  # and without a mask nothing
        ids = torch.zeros(2, new, dtype=torch.long, device="meta")
        model(ids, position_ids=ids, **{CACHE: cache})
    assert not reads


def test_copies_of_blocks_are_told_once_per_device(sent: list[int]) -> None:
    pool = PagePool([LayerGeometry(1, 8, 8)] * 2, num_blocks=100, block_size=4)
    cache = PagedCache(pool)
    step(cache, 2, 6)
    sent.clear()
    keys = [layer.keys.dense().clone() for layer in cache.layers]
    twin = cache.fork()
    step(twin, 2, 1)
    assert pool.stats().cow_copies == 2 and len(sent) == 3  # the index of the keys read above, the copies, the plan
    for layer, before in zip(twin.layers, keys):
        assert torch.equal(layer.keys.dense()[:, :, :6], before)


def test_the_host_reads_its_own_arrays() -> None:
    """On a CPU nothing is copied."""
    pool = PagePool([LayerGeometry(1, 8, 8)], num_blocks=100, block_size=4)
    tables = BlockTables(pool.manager)
    tables.add_rows(2)
    append = tables.append([5, 3])
    plan = StepPlan([tables], [append.slots], 0, 5, kept=(kept := {}))
    assert plan.on(CPU).slots.data_ptr() == append.slots.ctypes.data and not kept
    assert plan.on(CPU).block_table.data_ptr() == plan._host.tables.ctypes.data
