"""Masters: float32 copies of narrower parameters, which follow what users write to the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.ir.nodes import MASTER
from weft.runtime.memory.state import Variables


@final
class Masters:
    """The masters of all ranks of this process.

    Args:
        variables: of the ranks, with their masters.
    """

    def __init__(self, variables: Mapping[int, Variables]) -> None:
        end = f".{MASTER}"
        self._pairs: list[tuple[Tensor, Tensor]] = [
            (each[key.removesuffix(end)].detach(), each[key].detach())
            for each in variables.values()
            for key in each
            if key.endswith(end)
        ]

    def take(self) -> None:
        """Let masters be what was written to their parameters."""
        for parameter, master in self._pairs:
            follow(master, parameter)


def follow(wide: Tensor, narrow: Tensor) -> None:
    """Let `wide` be what was written to `narrow`, which was `wide`, rounded: only elements that differ from that.

    Values are compared, because a tensor's count of its writes does not see all of them.
    """
    same = narrow == wide.to(narrow.dtype)
    torch.where(same, wide, narrow.to(wide.dtype), out=wide)
