"""The places where transformers has no extension point, one file each.

Every patch wraps one function, acts only for a `PagedCache`, and is skipped with one warning where that function is
missing or has changed: results stay right then, only sharing is lost. `HF_PAGED_PATCHES=0` turns all of them off.
"""

import os
import warnings

from . import assisted, encoder_decoder, history, owner, prefill

PATCHES = (prefill, history, assisted, encoder_decoder, owner)


def apply() -> None:
    """Apply all patches, once."""
    if os.environ.get("HF_PAGED_PATCHES", "1") == "0":
        return
    for patch in PATCHES:
        problem = patch.apply()
        if problem:
            warnings.warn(f"hf_paged: {patch.TITLE} is off, results stay right: {problem}", stacklevel=3)
