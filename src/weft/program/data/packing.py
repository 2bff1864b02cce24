"""Rows of one length, cut from texts that stand one behind the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from weft.errors import UserError, shown
from weft.program.data.whole import whole_number, whole_numbers


@final
class Packed(Dataset[dict[str, Tensor]]):
    """Texts of many lengths as rows of one length, without padding: one plan, and no token is computed for nothing.

    Row i holds the tokens from i times `length` on of all texts, one behind the other; the last tokens, fewer than a
    row, are left out. A row is a dict of int64[length]: "tokens"; "text", the number of the text of each; "position",
    its place there. An attention that must not look over the border of a text compares "text" of query and key.

    Args:
        texts: map-style: each a tensor [n] or a list of tokens, or a mapping with one under `key`.
        length: tokens of a row.
        lengths: tokens of each text; without, each text is loaded once to see.
        key: where the tokens stand in a text that is a mapping.

    Raises:
        UserError: an argument cannot be; when a row is read, a text that has another length.
    """

    def __init__(
        self,
        texts: Any,
        length: int,
        *,
        lengths: Iterable[int] | None = None,
        key: str = "input_ids",
    ) -> None:
        tokens = whole_number(length)
        if tokens is None or tokens < 1:
            raise UserError(
                f"weft.Packed: length takes a number of tokens from 1, found {length!r}"
            )
        if not hasattr(texts, "__getitem__") or not hasattr(texts, "__len__"):
            raise UserError(
                f"weft.Packed: takes a dataset with __getitem__ and __len__, found a {type(texts).__name__}"
            )
        self._texts, self._length, self._key = texts, tokens, key
        if lengths is None:
            lengths = [len(self._tokens(number)) for number in range(len(texts))]
        every = whole_numbers(lengths, "weft.Packed: lengths")
        if len(every) != len(texts):
            raise UserError(
                f"weft.Packed: lengths takes a number of tokens for each of the {len(texts)} texts, found "
                f"{shown(every)}"
            )
        # Where each text ends, of all tokens.
        self._ends = list(accumulate(every))

    def __len__(self) -> int:
        """Rows."""
        return self._ends[-1] // self._length if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """A row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        at, end = row * self._length, (row + 1) * self._length
        parts: list[tuple[Tensor, int, int]] = []
        while at < end:
            text = bisect_right(self._ends, at)
            begin = self._ends[text - 1] if text else 0
            tokens, first = self._tokens(text), at - begin
            if len(tokens) != self._ends[text] - begin:
                raise UserError(
                    f"weft.Packed: text {text} has {len(tokens)} tokens, and lengths says {self._ends[text] - begin}; "
                    "give the lengths of these texts, or none"
                )
            taken = min(end, self._ends[text]) - at
            parts.append((tokens[first : first + taken], text, first))
            at += taken
        return {
            "tokens": torch.cat([tokens for tokens, _, _ in parts]),
            "text": torch.cat([torch.full((len(x),), text) for x, text, _ in parts]),
            "position": torch.cat([torch.arange(first, first + len(x)) for x, _, first in parts]),
        }

    def _tokens(self, number: int) -> Tensor:
        try:
            text = self._texts[number]
            found = torch.as_tensor(text[self._key] if hasattr(text, "keys") else text)
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
            raise UserError(
                f"weft.Packed: text {number} is no row of tokens, which it must be: {type(error).__name__}: {error}"
            ) from None
        if found.dim() != 1 or (found.is_floating_point() and len(found)):
            raise UserError(
                f"weft.Packed: text {number} is {found.dtype}{list(found.shape)}; expected a row of tokens, or a "
                f"mapping with one under {self._key!r}"
            )
        return found.to(torch.int64)
