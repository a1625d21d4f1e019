"""ARCHITECTURES.md from the rows that `python tests/test_architectures.py` finds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import architectures
import encoder_decoders

FILE = Path(__file__).with_name("ARCHITECTURES.md")

HEAD = """# Architectures

Every causal and every sequence-to-sequence type of transformers 5.24 (text and speech) as tiny random models, in float32:
greedy on a ragged padded batch past the window, 3 beams, 3 samples with one seed. {causal} of {all_causal} causal types and
{seq2seq} of {all_seq2seq} sequence-to-sequence types give exactly the default cache's tokens, and in the greedy run its logits
up to rounding. Written by `python tests/test_architectures.py --write`.

Numbers are layers. "kernel": always read by the kernel, through the block table. "dense": paged as well, but read through the
dense view, at least in some passes, since the model touches its keys, or asks for what the kernels lack. "own": transformers'
own layer in the same cache, reordered, forked, cropped and reset along, as it keeps states of fixed size, or nothing.
"""
COLUMNS = """
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
    """Write the file from all rows; a text instead of a row says what went wrong. `prefix` marks the names of
    sequence-to-sequence types."""
    good = {name: row for name, row in rows.items() if isinstance(row, Row)}
    bad = {**{name: row for name, row in rows.items() if isinstance(row, str)}, **architectures.SKIP}
    bad |= {prefix + name: reason for name, reason in encoder_decoders.EXCEPTIONS.items()}
    seq2seq = {name.removeprefix(prefix): row for name, row in good.items() if name.startswith(prefix)}
    causal = {name: row for name, row in good.items() if not name.startswith(prefix)}
    all_seq2seq = sum(name.startswith(prefix) for name in {**rows, **bad})
    text = HEAD.format(
        causal=len(causal),
        all_causal=len({**rows, **bad}) - all_seq2seq,
        seq2seq=len(seq2seq),
        all_seq2seq=all_seq2seq,
    )
    for title, part in (("Causal types", causal), ("Sequence-to-sequence types", seq2seq)):
        text += f"\n## {title}\n{COLUMNS}" + "".join(f"| {name} | {row} |\n" for name, row in sorted(part.items()))
    text += "\n## Notes\n\n| type | |\n|---|---|\n"
    text += "".join(f"| {name} | {note} |\n" for name, note in sorted(NOTES.items()))
    text += "\n## Not identical, or not run\n\n| type | reason |\n|---|---|\n"
    text += "".join(f"| {name} | {reason} |\n" for name, reason in sorted(bad.items()))
    FILE.write_text(text)
