"""Views there and back."""

from __future__ import annotations

from contexts import NOTHING
from weft.compiler.graph.rewriting import undo_views
from weft.ir import parse_graph, verify

GRAPH = """
graph "views"
%x = batch "x" : float32[4, 6]
%a = call aten.view.default(%x, [24]) : float32[24]
%b = call aten._unsafe_view.default(%a, [2, 12]) : float32[2, 12]
%c = call aten.reshape.default(%b, [4, 6]) : float32[4, 6]
%d = call aten.view.default(%c, [24]) : float32[24]
%e = call aten.neg.default(%d) : float32[24]
%f = call aten.view.default(%e, [4, 6]) : float32[4, 6]
%g = call aten.mul.Tensor(%f, %c) : float32[4, 6]
output "c" %c
output "g" %g
"""


def test_what_is_viewed_there_and_back_is_read_as_it_is() -> None:
    graph = verify(undo_views(parse_graph(GRAPH), NOTHING))
    assert graph.producers["g"].uses == ("f", "x")
    assert graph.producers["d"].uses == ("x",)
    # Behind an op it is no longer the same.
    assert graph.producers["f"].uses == ("e",)
    assert not {"a", "b", "c"} & set(graph.values)
    assert undo_views(graph, NOTHING) is graph
