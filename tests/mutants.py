"""Lines that the tests guard, each with a way to break it: the pool, rows, windows, passes, interrupts. See `mutations.py`."""

from __future__ import annotations

from typing import NamedTuple

MACHINE = "test_blocks_machine.py::test_ten_thousand_operations_match_the_oracle"


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str  # pytest's arguments


MUTANTS = [
    # blocks and tables
    Mutant(
        "a fork counts no references",
        "tables.py",
        "twin.manager.add_references(twin.held_frames(), 1)",
        "twin.manager.add_references(twin.held_frames(), 0)",
        MACHINE,
    ),
    Mutant(
        "a crop gives nothing back",
        "tables.py",
        "self.table[dropped] = UNUSED\n            self.manager.add_references(frames, -1)\n\n    def free",
        "self.table[dropped] = UNUSED\n\n    def free",
        MACHINE,
    ),
    Mutant(
        "a select counts each row once",
        "tables.py",
        "change = np.bincount(chosen, minlength=self.num_rows) - 1",
        "change = (np.bincount(chosen, minlength=self.num_rows) > 0) - 1",
        MACHINE,
    ),
    Mutant(
        "no copy on write",
        "tables.py",
        "shared = self.manager.ref_counts[tails] > 1",
        "shared = self.manager.ref_counts[tails] > 99",
        MACHINE,
    ),
    Mutant(
        "the first writer keeps a block that others read",
        "tables.py",
        "keepers = first[self.manager.ref_counts[frames] == writers]",
        "keepers = first",
        MACHINE,
    ),
    Mutant(
        "nobody keeps the original",
        "tables.py",
        "keepers = first[self.manager.ref_counts[frames] == writers]",
        "keepers = first[:0]",
        MACHINE,
    ),
    Mutant(
        "the frame copied from stays referenced",
        "tables.py",
        "manager.add_references(copy_from, -1)",
        "manager.add_references(copy_from, 0)",
        MACHINE,
    ),
    Mutant(
        "an adopted block is not counted",
        "tables.py",
        "self.manager.add_references(frames, 1)",
        "self.manager.add_references(frames, 0)",
        "test_prefix.py",
    ),
    Mutant(
        "joined tables are padded with frame 0",
        "tables.py",
        "constant_values=UNUSED",
        "constant_values=0",
        "test_tree.py -k unused_beyond",
    ),
    Mutant(
        "the pool grows past its bound",
        "blocks.py",
        "if lacking > self.max_blocks - self.num_blocks:",
        "if lacking > self.max_blocks:",
        "test_prefix.py -k growth",
    ),
    Mutant(
        "what was abandoned stays",
        "blocks.py",
        "            self._abandoned[0].free()\n",
        "            pass\n",
        MACHINE,
    ),
    # windows
    Mutant(
        "a window slides one token too far",
        "state.py",
        "tables.slide(group.first_seen(tables.lengths))",
        "tables.slide(group.first_seen(tables.lengths) + 1)",
        "test_machine.py",
    ),
    Mutant(
        "a window keeps one token too many",
        "state.py",
        "tables.slide(group.first_seen(tables.lengths))",
        "tables.slide(group.first_seen(tables.lengths) - 1)",
        "test_windows.py -k not_one_block",
    ),
    Mutant(
        "a crop goes back past what a window keeps",
        "state.py",
        "if (tables.starts * tables.manager.block_size > first).any():",
        "if False:",
        "test_machine.py",
    ),
    # a pass
    Mutant(
        "a failed pass keeps its blocks",
        "state.py",
        "Exception:\n                for tables, mark in zip(self.groups, marks):\n                    tables.restore(mark)",
        "Exception:",
        "test_faults.py -k 'copy or handles'",
    ),
    Mutant(
        "the restored blocks are free as well",
        "blocks.py",
        "            self.num_free = len(free)\n",
        "",
        "test_faults.py -k 'copy or handles'",
    ),
    Mutant(
        "a shortage comes after states have moved",
        "layers.py",
        "        self.state.reserve(q_length)\n",
        "",
        "test_shortage.py -k 'jamba or qwen4'",
    ),
    Mutant(
        "an empty cache keeps the states of a failed pass",
        "cache.py",
        "            if not self._state.width:\n",
        "            if False:\n",
        "test_shortage.py -k 'by_hand and jamba'",
    ),
    Mutant(
        "positions of a pass that has not begun stay",
        "cache.py",
        "                    layer.forget_positions()\n",
        "                    pass\n",
        "test_shortage.py -k qwen4",
    ),
    Mutant(
        "two threads in one pass",
        "access.py",
        "if len(plan.written) < layers:",
        "if False:",
        "test_lifetime.py -k two_threads",
    ),
    Mutant(
        "two threads in one generate",
        "access.py",
        "return self.thread is not None and self.thread != threading.get_ident()",
        "return False",
        "test_threads.py",
    ),
    Mutant(
        "a generate is never over",
        "patches/owner.py",
        "if not inside and state.thread == thread:",
        "if False:",
        "test_threads.py",
    ),
    Mutant(
        "a failed prefill keeps its rows",
        "patches/prefill.py",
        "                    if empty:\n                        cache.reset()",
        "                    if empty:\n                        pass",
        "test_threads.py -k prefill",
    ),
    Mutant(
        "a failed prefill takes what another thread wrote",
        "patches/prefill.py",
        "if plan is None or not plan.q_length or plan.thread == threading.get_ident():",
        "if True:",
        "test_threads.py -k prefill",
    ),
    Mutant(
        "a fork forgets to keep what leaves a window",
        "state.py",
        "twin.cross, twin.recording = self.cross, self.recording",
        "twin.cross = self.cross",
        "test_tree.py -k window",
    ),
    Mutant(
        "a join forgets to keep what leaves a window",
        "state.py",
        "        twin.recording = any(state.recording for state in states)\n",
        "",
        "test_tree.py -k window",
    ),
    # interrupts
    Mutant(
        "an interrupt leaves the counts",
        "blocks.py",
        "        if kind is not None and not issubclass(kind, Exception):\n            self.recount()\n",
        "        pass\n",
        "test_interrupts.py -k any_line",
    ),
    Mutant(
        "an interrupted cache is used",
        "access.py",
        "if whole and self.interrupted:",
        "if False:",
        "test_interrupts.py -k any_line",
    ),
    Mutant(
        "tables that an interrupt lost are lost",
        "tables.py",
        "            self.manager.abandon(self)\n",
        "            pass\n",
        "test_interrupts.py -k any_line",
    ),
    Mutant(
        "a prefix that an interrupt broke stays so",
        "prefix.py",
        "            node.children = children[id(node)]\n",
        "            pass\n",
        "test_interrupts.py -k any_line",
    ),
    Mutant(
        "a pool in a forked process",
        "pool.py",
        "return os.getpid() != self._process",
        "return False",
        "test_lifetime.py -k forked",
    ),
    Mutant(
        "a pad is called a token",
        "state.py",
        "        if lost.any():\n",
        "        if False:\n",
        "test_machine.py test_padding.py",
    ),
    Mutant(
        "measuring a model draws random numbers",
        "layout.py",
        'with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):',
        "if True:",
        "test_enable.py -k random_numbers",
    ),
]
