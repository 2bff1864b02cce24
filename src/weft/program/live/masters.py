"""Masters: float32 copies of narrower parameters, which follow what users write to the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.ir.nodes import MASTER
from weft.program.live.laid import cut_value, laid_as, of_rank, parts_of
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
        self._frozen: dict[str, Tensor] = {}

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

    def wait(self, masters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Keep masters of parameters that no plan updates so far, each as parameter and master, in place of others."""
        self.waiting = {key: master for key, (_, master) in masters.items()}
        self._frozen = {key: parameter for key, (parameter, _) in masters.items()}

    def fill_waiting(self, whole: Mapping[str, Tensor]) -> None:
        """Let the masters that wait for a plan be what whole tensors hold, by the parameters' keys."""
        for key, waiting in self.waiting.items():
            value = whole[key].to(waiting.dtype)
            if isinstance(waiting, GlobalTensor):
                spec = waiting.spec
                waiting = cut_value(value, spec.layout, spec.mesh, waiting.shares)
            else:
                waiting = value.detach().to(waiting.device, copy=True)
            self.waiting[key] = waiting

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
        for key, master in self.waiting.items():
            for wide, narrow in _parts(master, self._frozen[key]):
                follow(wide, narrow)


def follow(wide: Tensor, narrow: Tensor) -> None:
    """Let `wide` be what was written to `narrow`, which was `wide`, rounded: only elements that differ from that.

    Values are compared, because a tensor's count of its writes does not see all of them.
    """
    same = narrow == wide.to(narrow.dtype)
    torch.where(same, wide, narrow.to(wide.dtype), out=wide)


def _parts(master: Tensor, parameter: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The parts that this process has of a master and of its parameter, which it lies like."""
    if isinstance(master, GlobalTensor) and isinstance(parameter, GlobalTensor):
        wide, narrow = parts_of(master), parts_of(parameter)
        return [(wide[rank].detach(), narrow[rank].detach()) for rank in wide]
    return [(master.detach(), parameter.detach())]
