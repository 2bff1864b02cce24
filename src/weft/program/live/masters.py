"""Masters: float32 copies of narrower parameters, which follow what users write to the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.ir.nodes import MASTER
from weft.program.live.laid import laid_as, of_rank
from weft.program.live.variables import add_masters
from weft.runtime.memory.state import Variables
from weft.tensor import GlobalTensor


@final
class Masters:
    """The masters of all ranks of this process.

    Args:
        variables: of the ranks, with their masters.

    Attributes:
        nodes: of all masters, by key, as the plans have them that ran so far.
        waiting: masters of parameters that no plan updates so far, by the parameter, as a checkpoint had them: laid
            like the parameter, or whole where it is an ordinary tensor.
    """

    def __init__(self, variables: Mapping[int, Variables]) -> None:
        self._variables = variables
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.nodes: dict[str, Input] = {}
        self.waiting: dict[str, Tensor] = {}

    def know(self, graph: LogicalGraph) -> None:
        """A plan is to run, which may update parameters that had no master yet. Every process must call it."""
        add_masters(self._variables, graph)
        end = f".{MASTER}"
        for node in graph.of_kind(Input):
            if node.role == "state" and node.key.endswith(end) and node.key not in self.nodes:
                self.nodes[node.key] = node
                waiting = self.waiting.pop(node.key.removesuffix(end), None)
                if waiting is not None:
                    self._fill(node, waiting)
        self._pairs = [
            (each[key.removesuffix(end)].detach(), each[key].detach())
            for each in self._variables.values()
            for key in each
            if key.endswith(end)
        ]

    def _fill(self, node: Input, waiting: Tensor) -> None:
        """Let a master be what a checkpoint had of it."""
        layout = node.value.layout
        assert layout is not None  # all values of a compiled graph have one
        if isinstance(waiting, GlobalTensor):
            waiting = laid_as(waiting, layout, torch.float32, node.shares)
        for rank, variables in self._variables.items():
            if node.key in variables:
                variables.write(node.key, of_rank(waiting, rank))

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
