"""Which tokens a cache holds. A cache sees keys and values only; `generate` tells it the ids."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .blocks import Int64


class History:
    """The token at each padded position of a cache's rows, as far as it is known.

    Attributes:
        root: what the keys and values depend on beside the tokens; see `hf_paged.weights`.
        known: number of leading positions whose tokens are known. A cache may hold more, where somebody ran the model by hand,
            or fewer, after a `crop` or a pass that failed.
    """

    def __init__(self, root: bytes, tokens: Int64, given: int):
        """`tokens` [B, known] are what the cache holds or is about to hold; `generate` was given ids for the last `given` of
        these positions, and goes on with those."""
        self.root = root
        self.known = tokens.shape[1]
        self._shift = tokens.shape[1] - given
        self._prompt, self._prompt_rows = tokens, np.arange(len(tokens))
        self._latest: Tensor | None = None  # [B, given + generated]
        self._latest_rows = self._prompt_rows

    def follow(self, ids: Tensor, width: int) -> bool:
        """Take notice of the sequences so far, `ids` [B, n], of which the cache holds `width` positions. Costs nothing.
        Returns False where the cache holds more than is known, or less than what comes before these ids."""
        if not self._shift <= width <= self.known or len(ids) != len(self._latest_rows):
            return False
        self._latest, self._latest_rows, self.known = ids, np.arange(len(ids)), self._shift + ids.shape[1]
        return True

    def tokens(self) -> Int64:
        """What is known, int64 [B, known]."""
        prompt = self._prompt[self._prompt_rows]
        if self._latest is None:
            return prompt[:, : self.known]
        latest = self._latest.detach().cpu().numpy()[self._latest_rows]
        return np.concatenate([prompt[:, : self._shift], latest], 1)[:, : self.known]

    def select(self, rows: Int64) -> None:
        """Row `i` becomes what row `rows[i]` was."""
        self._prompt_rows, self._latest_rows = self._prompt_rows[rows], self._latest_rows[rows]

    def fork(self, rows: Int64) -> History:
        """That of a cache with these rows."""
        twin = History.__new__(History)
        vars(twin).update(vars(self))
        twin.select(rows)
        return twin
