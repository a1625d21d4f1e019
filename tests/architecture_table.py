"""ARCHITECTURES.md from the rows that `python tests/test_architectures.py` finds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import architectures

FILE = Path(__file__).with_name("ARCHITECTURES.md")

HEAD = """# Architectures

Every causal type of transformers 5.24 and {encoder_decoder} encoder-decoder ones as tiny random models, in float32:
greedy on a ragged left-padded batch past the window, 3 beams, 3 samples with one seed. Of the {causal} causal types
{identical} give exactly the default cache's tokens, and in the greedy run its logits up to rounding; so do the
encoder-decoder ones. Written by `python tests/test_architectures.py --write`.

Numbers are layers. "kernel": always read by the kernel, through the block table. "dense": paged as well, but read through the
dense view, at least in some passes, since the model touches its keys, or asks for what the kernels lack. "own": transformers'
own layer in the same cache, reordered, forked, cropped and reset along, as it keeps states of fixed size, or nothing.

| type | kernel | dense | own |
|---|---|---|---|
"""

NOTES = {
    "blt": "its second cache, a `DynamicCache` of its own making, holds the layers of its decoder; only those of its encoder "
    "are paged",
    "deepseek_v4": "its compressed layers keep a window of fixed size beside the compressed entries, and all its layers share "
    "one mask: paging would save nothing, so they stay transformers' own",
    "git": "run with an image: without one it takes the first columns of the mask for the image in its decode steps, pads "
    "too, and a `PagedCache` refuses with a sentence to show keys of pads",
    "minimax_m3_vl_text": "its indexers look at pads, so pads are stored, and where there are some, all layers are read dense",
    "recurrent_gemma": "keeps its recurrent state in its modules, one row per row of the batch and of the last call only, "
    "whatever the cache; so equal rows are not prefilled once, and neither beams nor turns of two caches in exchange carry "
    "it along: the tokens are the default cache's, which has the same limits",
    "xlm": "run without pads: it takes all pads for right padding, and zeroes its last tokens for them, with any cache",
}


class Row(NamedTuple):
    """How the layers of a type were served."""

    kernel: int
    dense: int
    own: dict[str, int]  # by the name of the layer's class

    def __str__(self) -> str:
        own = ", ".join(f"{count} {name}" for name, count in sorted(self.own.items()))
        return " | ".join([str(self.kernel or ""), str(self.dense or ""), own])


def write(rows: dict[str, Row | str], prefix: str) -> None:
    """Write the file from all rows; a text instead of a row says what went wrong."""
    good = {name: row for name, row in rows.items() if isinstance(row, Row)}
    causal = [name for name in rows if not name.startswith(prefix)]
    text = HEAD.format(
        encoder_decoder=len(rows) - len(causal),
        causal=len(causal) + len(architectures.SKIP),
        identical=len([name for name in causal if name in good]),
    )
    text += "".join(f"| {name} | {row} |\n" for name, row in sorted(good.items()))
    text += "\n## Notes\n\n| type | |\n|---|---|\n"
    text += "".join(f"| {name} | {note} |\n" for name, note in sorted(NOTES.items()))
    text += "\n## Not identical, or not run\n\n| type | reason |\n|---|---|\n"
    reasons = {**architectures.SKIP, **{name: row for name, row in rows.items() if not isinstance(row, Row)}}
    text += "".join(f"| {name} | {reason} |\n" for name, reason in sorted(reasons.items()))
    FILE.write_text(text)
