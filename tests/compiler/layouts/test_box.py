"""Boxing of one training step of a linear layer on two ranks, and its calls as ranks run them."""

from __future__ import annotations

import pytest

from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box, deduce
from weft.compiler.local.localize import communicators, localize, localize_all
from weft.compiler.signatures import check_signatures
from weft.errors import InternalError
from weft.ir import LogicalGraph, parse_graph
from weft.ir.logical import Box
from weft.ir.plan import LocalCall
from weft.layout import Broadcast, Split, placement

PAIR = placement("cpu", [0, 1])

# y = x wᵀ, loss = sum(y) / 6, gradient of w, plain descent; the result y is returned too.
STEP = """\
graph "step"
%w = parameter "fc.weight" : float32[4, 5]
%x = batch "x" : float32[6, 5]
%t = call aten.t.default(%w) : float32[5, 4] at "train.py":3 in "fc"
%y = call aten.mm.default(%x, %t) : float32[6, 4] at "train.py":3 in "fc"
%sum = call aten.sum.default(%y) : float32[] at "train.py":7
%loss = call aten.div.Tensor(%sum, 6) : float32[] at "train.py":7
%ones = call aten.full.default([6, 4], 1, dtype=!dtype:float32) : float32[6, 4] at "train.py":7 backward
%seed = call aten.div.Tensor(%ones, 6) : float32[6, 4] at "train.py":7 backward
%turned = call aten.t.default(%seed) : float32[4, 6] at "train.py":3 in "fc" backward
%gw = call aten.mm.default(%turned, %x) : float32[4, 5] at "train.py":3 in "fc" backward
update "SGD" group 0 %w from %gw
output "loss" %loss
output "[1]" %y
"""

STRATEGIES = {
    "data": Hints({"x": (Split(0),), "fc.weight": (Broadcast(),)}),
    "columns": Hints({"x": (Broadcast(),), "fc.weight": (Split(0),)}),
    "rows": Hints({"x": (Split(0),), "fc.weight": (Split(1),)}),
}


def boxed(hints: Hints) -> LogicalGraph:
    graph = parse_graph(STEP)
    return box(graph, deduce(graph, hints, PAIR))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_share_calls_that_are_equal_for_them(strategy: str) -> None:
    graph = boxed(STRATEGIES[strategy])
    groups = communicators(graph)
    both = localize_all(graph, (0, 1), groups)
    assert both == {rank: localize(graph, rank, groups) for rank in (0, 1)}
    # Those of the graph: boxing makes its own for each rank.
    calls = {
        rank: [n for n in both[rank].nodes if isinstance(n, LocalCall) and "aten." in n.op]
        for rank in both
    }
    shapes = [[call.first for call in calls[rank]] for rank in both]
    equal = [a == b for a, b in zip(*shapes, strict=True)]
    assert any(equal)
    assert [a is b for a, b in zip(calls[0], calls[1], strict=True)] == equal
    for call in calls[1]:
        anew = LocalCall.of(call.op, call.args, call.outputs, call.phase, kwargs=call.kwargs)
        assert anew == call


def test_readers_of_one_layout_share_a_boxing() -> None:
    graph = boxed(STRATEGIES["data"])
    wanted = [(node.input.name, node.output.layout) for node in graph.of_kind(Box)]
    assert len(wanted) == len(set(wanted))


def test_layouts_that_no_rule_allows_are_refused() -> None:
    text = str(boxed(STRATEGIES["data"]))
    check_signatures(parse_graph(text))
    right, wrong = "(%ones, 6) : float32[6, 4] @0(S(0))", "(%ones, 6) : float32[6, 4] @0(S(1))"
    assert right in text
    with pytest.raises(
        InternalError, match=r"aten.div.Tensor at .*no rule allows S\(0\) -> S\(1\)"
    ):
        check_signatures(parse_graph(text.replace(right, wrong)))
