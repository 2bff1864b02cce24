"""Products are added up before they meet anything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contexts import NOTHING
from weft.capture import capture
from weft.compiler.graph.products_first import products_first
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, LogicalGraph, Ref

GRAPH = """
graph "sums"
%r = batch "r" : float32[4, 8]
%s = batch "s" : float32[4, 8]
%w = parameter "w" : float32[8, 8]
%a = call aten.mm.default(%r, %w) : float32[4, 8]
%b = call aten.mm.default(%s, %w) : float32[4, 8]
%moved = call aten.view.default(%b, [4, 8]) : float32[4, 8]
{sums}
output "y" %y
"""


def after(*sums: str) -> LogicalGraph:
    lines = "\n".join(f"%{each.replace(' = ', ' = call ')} : float32[4, 8]" for each in sums)
    return verify(products_first(verify(parse_graph(GRAPH.format(sums=lines))), NOTHING))


def added(graph: LogicalGraph) -> list[str]:
    """Each sum as its two terms."""
    calls = [call for call in graph.of_kind(Call) if call.op == "aten.add.Tensor"]
    return ["+".join(arg.name for arg in call.args if isinstance(arg, Ref)) for call in calls]


ADD = "aten.add.Tensor"


def test_a_residual_between_products() -> None:
    graph = after(f"x = {ADD}(%r, %a)", f"y = {ADD}(%x, %moved)")
    assert added(graph) == ["a+moved", "r+y.products"]


def test_others_are_added_up_too() -> None:
    graph = after(f"x = {ADD}(%r, %a)", f"z = {ADD}(%s, %x)", f"y = {ADD}(%z, %moved)")
    assert added(graph) == ["s+r", "a+moved", "z.others+y.products"]


@pytest.mark.parametrize(
    "sums",
    [
        (f"x = {ADD}(%a, %moved)", f"y = {ADD}(%r, %x)"),
        (f"x = {ADD}(%r, %a, alpha=2)", f"y = {ADD}(%x, %moved)"),
        (f"x = {ADD}(%r, %a)", f"y = {ADD}(%x, %x)"),
        (f"x = {ADD}(%r, %a)", f"z = {ADD}(%x, %moved)", "y = aten.mul.Tensor(%z, %x)"),
    ],
    ids=["in order", "scaled", "twice", "read beside"],
)
def test_other_sums_stay(sums: tuple[str, ...]) -> None:
    terms = [
        each.partition("(%")[2].rstrip(")").partition(", alpha")[0] for each in sums if ADD in each
    ]
    assert added(after(*sums)) == [each.replace(", %", "+") for each in terms]


@pytest.mark.thorough
def test_a_very_long_sum() -> None:
    """As many terms as a recurrent cell has time steps."""
    model = nn.Linear(4, 4, bias=False)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        total = batch
        for _ in range(600):
            total = total + model(batch)
        return total.sum()

    graph = capture(model, loss_fn, None, torch.ones(8, 4)).graph
    made = verify(products_first(graph, NOTHING))
    assert len(made.nodes) == len(graph.nodes)
