"""Break one guarded line at a time, in a copy of the package, and see that a test notices: `python tests/mutations.py [WORD]`.

Prints which test caught each mutant. With a word, only the mutants that have it in their description or file. The exit status
is 1 if one survives, or if a line to break isn't there exactly once.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MACHINE = "test_blocks_machine.py::test_ten_thousand_operations_match_the_oracle"

NO_SHRINKING = """
from hypothesis import Phase, settings
settings.register_profile("mutations", phases=[Phase.generate])
settings.load_profile("mutations")
"""


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
        "(self.table[dropped], -1)\n            self.table[dropped] = UNUSED\n            self.lengths",
        "(self.table[dropped], 0)\n            self.table[dropped] = UNUSED\n            self.lengths",
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
        "                for tables, mark in zip(self.groups, marks):\n                    tables.restore(mark)\n",
        "",
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
        "cache.rewind(0)  #",
        "pass  #",
        "test_threads.py -k prefill",
    ),
    Mutant(
        "a failed prefill takes what another thread wrote",
        "patches/prefill.py",
        "if fresh and (plan is None or not plan.q_length or plan.thread == threading.get_ident()):",
        "if fresh:",
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
    # prefixes
    Mutant(
        "a hash is believed: tokens",
        "prefix.py",
        "and node.parent is parent and node.tokens == block else None",
        "and node.parent is parent else None",
        "test_prefix.py -k collisions",
    ),
    Mutant(
        "a hash is believed: parent",
        "prefix.py",
        "and node.parent is parent and node.tokens == block else None",
        "and node.tokens == block else None",
        "test_prefix.py -k collisions",
    ),
    Mutant(
        "a hash without its parent",
        "prefix.py",
        "hashlib.blake2b(parent + tokens, digest_size=16)",
        "hashlib.blake2b(tokens, digest_size=16)",
        "test_prefix.py",
    ),
    Mutant(
        "heads are evicted before tails",
        "prefix.py",
        "(self._clock << 32) - np.arange",
        "(self._clock << 32) + np.arange",
        "test_prefix.py -k recently",
    ),
    Mutant(
        "the most recently used goes first",
        "prefix.py",
        "self._clock += 1",
        "self._clock -= 1",
        "test_prefix.py -k recently",
    ),
    Mutant(
        "a live block is evicted",
        "prefix.py",
        "idle = np.flatnonzero(self.held & (self.manager.ref_counts == 1))",
        "idle = np.flatnonzero(self.held)",
        "test_prefix.py -k live",
    ),
    Mutant(
        "what was evicted is found",
        "prefix.py",
        "            node.frames[group] = UNUSED\n",
        "",
        "test_prefix.py",
    ),
    Mutant(
        "a hollow prefix stays",
        "prefix.py",
        "            self._touch(nodes)\n            self._prune(parent)\n",
        "            self._touch(nodes)\n",
        "test_machine.py",
    ),
    Mutant(
        "a window adopts too little",
        "prefix.py",
        "min(first, length - 1)) // self.manager.block_size",
        "min(first, length - 1) + 1) // self.manager.block_size",
        "test_prefix.py -k window",
    ),
    Mutant(
        "no token is left to compute",
        "reuse.py",
        "limits = [min([len(row) - 1,",
        "limits = [min([len(row),",
        "test_prefix_caching.py -k whole_blocks",
    ),
    Mutant(
        "image placeholders match",
        "reuse.py",
        "*np.flatnonzero(np.isin(row, placeholders))[:1].tolist()]",
        "]",
        "test_prefix_caching.py -k placeholders",
    ),
    Mutant(
        "positions are not looked at",
        "reuse.py",
        '    if not _counts_tokens(model_kwargs.get("position_ids"), count, real):\n        return None\n',
        "",
        "test_prefix_caching.py -k ids_do_not_tell",
    ),
    Mutant(
        "weights are not looked at",
        "reuse.py",
        "root = weights.fingerprint(model, cache.salt)",
        "root = cache.salt.encode()",
        "test_prefix_caching.py -k 'weights or salt'",
    ),
    Mutant(
        "a cache of other weights goes on",
        "reuse.py",
        "if history is None or history.root != root or history.known < cached:",
        "if history is None or history.known < cached:",
        "test_prefix_caching.py -k from_before",
    ),
    Mutant(
        "only the first weight counts",
        "weights.py",
        "for module in model.modules():",
        "for module in itertools.islice(model.modules(), 3):",
        "test_prefix_caching.py -k weights",
    ),
    Mutant(
        "a version is not looked at",
        "weights.py",
        "0 if part.is_inference() else part._version",
        "0",
        "test_weights.py -k no_sample",
    ),
    Mutant(
        "an address is not looked at",
        "weights.py",
        "[part.data_ptr(), 0",
        "[0",
        "test_weights.py -k no_sample",
    ),
    Mutant(
        "elements are not looked at",
        "weights.py",
        "digest.update(torch.cat(few).view(torch.uint8).cpu().numpy().tobytes())",
        "pass",
        "test_weights.py -k through_data",
    ),
    Mutant(
        "all samples are in one column",
        "weights.py",
        "% row if step > row else step",
        "* 0",
        "test_weights.py -k 'spread or through_data'",
    ),
    Mutant(
        "autocast is not looked at",
        "weights.py",
        "autocast_dtype(model.device)]",
        "None]",
        "test_weights.py -k autocast",
    ),
    Mutant(
        "a replaced forward is not looked at",
        "weights.py",
        'if "forward" in attributes:',
        "if False:",
        "test_weights.py -k forward",
    ),
    Mutant(
        "a number that comes again",
        "weights.py",
        "_serials[thing] = next(_next_serial)",
        "_serials[thing] = 0",
        "test_weights.py -k forward",
    ),
    Mutant(
        "a weight that cannot be read counts nothing",
        "weights.py",
        "        return None\n",
        '        return b""\n',
        "test_weights.py -k kind",
    ),
    Mutant(
        "keys that depend on the length are kept",
        "reuse.py",
        "        and not _varying_rope(model.config.get_text_config())\n",
        "",
        "test_weights.py -k keys_that_depend",
    ),
    Mutant(
        "an offloaded model computes on no device",
        "reuse.py",
        "(*given, model)",
        "(given[0], model)",
        "test_weights.py -k offloaded",
    ),
    Mutant(
        "prefixes of an instrumented model are kept",
        "patches/prefill.py",
        "None if random or instrumented else",
        "None if random else",
        "test_weights.py -k 'steered or adapters'",
    ),
    Mutant(
        "equal rows of an instrumented model are one",
        "patches/prefill.py",
        "apart = random or instrumented or",
        "apart = random or",
        "test_weights.py -k 'steered or adapters'",
    ),
    Mutant(
        "an instrumented model runs packed",
        "patches/prefill.py",
        "if not instrumented and generation_config",
        "if generation_config",
        "test_weights.py -k hook_sees",
    ),
    Mutant(
        "an instrumented model runs in chunks",
        "patches/prefill.py",
        "if given is None and not instrumented:",
        "if given is None:",
        "test_weights.py -k hook_sees",
    ),
    Mutant(
        "hooks of transformers count",
        "rows.py",
        "(torch|transformers|accelerate|hf_paged)",
        "(torch|accelerate|hf_paged)",
        "test_weights.py -k transformers",
    ),
    Mutant(
        "prepared inputs of others are not looked at",
        "rows.py",
        'if name == "prepare_inputs_for_generation"]',
        "if False]",
        "test_weights.py -k prepared",
    ),
    Mutant(
        "FSDP shares",
        "rows.py",
        "type(module).__module__.startswith(FSDP)",
        "False",
        "test_weights.py -k fsdp",
    ),
    Mutant(
        "a pass that no kernel read is believed",
        "plan.py",
        "return len(self.written) == layers and self.written <= self.attended",
        "return len(self.written) == layers",
        "test_machine.py",
    ),
    Mutant(
        "a pass that broke off is believed",
        "plan.py",
        "return len(self.written) == layers and self.written <= self.attended",
        "return self.written <= self.attended",
        "test_prefix_caching.py -k broke_off",
    ),
    Mutant(
        "a look at the keys hides a pass that broke off",
        "state.py",
        "            self._settle()\n            nothing",
        "            nothing",
        "test_faults.py -k interrupt",
    ),
    Mutant(
        "tokens fed by hand are taken for those of generate",
        "history.py",
        "if width > self.known or len(ids) != len(self._latest_rows):",
        "if len(ids) != len(self._latest_rows):",
        "test_machine.py",
    ),
    Mutant(
        "a history does not follow its rows",
        "history.py",
        "self._prompt_rows, self._latest_rows = self._prompt_rows[rows], self._latest_rows[rows]",
        "pass",
        "test_machine.py",
    ),
    Mutant(
        "a packed pass takes pads for tokens",
        "reuse.py",
        "    return Packing(new, real)\n",
        "    return Packing(new, np.ones_like(real))\n",
        "test_prefix_caching.py -k ragged",
    ),
    Mutant(
        "joined rows are padded on the right",
        "state.py",
        "return np.pad(real, ((0, 0), (width - self.width, 0)))",
        "return np.pad(real, ((0, 0), (0, width - self.width)))",
        "test_tree.py",
    ),
]


def check(mutant: Mutant, folder: Path) -> str | None:
    """The test that catches it, None if it survives."""
    file = folder / "hf_paged" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        words = re.findall(r"'[^']*'|\S+", mutant.tests)
        tests = [word.strip("'") for word in words]
        tests = [f"tests/{word}" if word.startswith("test_") else word for word in tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        file.write_text(text)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return found[1].removeprefix("tests/") if found else None


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # As an installed package lies: hf_paged.patches is a folder of its own in the sources.
        shutil.copytree(ROOT / "hf_paged", folder / "hf_paged")
        shutil.copytree(ROOT / "patches", folder / "hf_paged" / "patches")
        for part in ("tests", "examples"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "pyproject.toml", folder)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(NO_SHRINKING)
        for mutant in MUTANTS:
            if word not in mutant.what and word not in mutant.file:
                continue
            text = (folder / "hf_paged" / mutant.file).read_text()
            if text.count(mutant.old) != 1:
                caught = f"NOTHING: the line to break is there {text.count(mutant.old)} times"
                bad, line = bad + 1, 0
            else:
                line = text[: text.index(mutant.old)].count("\n") + 1
                test = check(mutant, folder)
                caught, bad = test or "NOTHING", bad + (test is None)
            print(f"{mutant.file}:{line} | {mutant.what} | {caught}", flush=True)
    print(f"{bad} of them survive" if bad else "all caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
