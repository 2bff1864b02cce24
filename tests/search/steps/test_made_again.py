"""What runs again where blocks are recomputed: as many calls as the plan with recomputation has more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import weft
from search.jobs import decoder, step_of
from weft.ir.logical import Call
from weft.layout import Placement
from weft.planning.machine import machine_of
from weft.planning.plans import plan_stored
from weft.planning.stored_step import StoredStep
from weft.search.steps.facts import recomputed_values
from weft.search.steps.repeated import repeated_blocks


class Layers(nn.Module):
    """Layers in turn, each with a function that its backward needs the result of alone, or what it got."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Layer(function) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(x)
        return made


class _Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def of_tanh() -> StoredStep:
    return step_of(Layers(torch.tanh), 8, 16)


def of_gelu() -> StoredStep:
    return step_of(Layers(nn.functional.gelu), 8, 16)


def calls(step: StoredStep, *recompute: str) -> tuple[Counter[str], Counter[str]]:
    """The calls of a plan on one device by op, and of those of the forward the ones that would run again."""
    where = Placement("cpu", (1,), (0,))
    compiled = plan_stored(
        step, weft.Strategy(recompute=recompute), where, costs=machine_of("h100x1").planned
    )
    blocks = repeated_blocks(step.modules)
    assert blocks is not None
    again, every = recomputed_values(compiled.graph, blocks), compiled.graph.of_kind(Call)
    forward = [each for each in every if each.phase.kind == "forward"]
    repeated = Counter(each.op for each in forward if any(v.name in again for v in each.makes))
    return Counter(each.op for each in every if each.op != "weft.after"), repeated


@pytest.mark.parametrize(
    ("step", "some"),
    [(of_tanh, False), (of_gelu, True), (decoder, True)],
    ids=["tanh", "gelu", "decoder"],
)
def test_what_runs_again_is_what_the_plan_makes_again(
    step: Callable[[], StoredStep], some: bool
) -> None:
    """A layer whose backward reads what it hands on runs not again."""
    kept, repeated = calls(step())
    again, _ = calls(step(), "blocks.*")
    assert again - kept == repeated
    assert bool(repeated) == some
