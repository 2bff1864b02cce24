"""The passes of loss scaling on a small graph."""

from __future__ import annotations

from contexts import NOTHING
from weft.compiler.training.gradients import SCALE, TRACKER, scale_loss, unscale
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, Update

GRAPH = """
graph "scaled"
%v = parameter "v" : float32[4]
%w = parameter "w" : float32[4]
%b = buffer "b" : float32[4]
%l = call aten.sum.default(%v) : float32[]
%s = call weft.loss_seed(%l) : float32[] {0 backward}
%gv = call aten.expand.default(%s, [4]) : float32[4] {0 backward}
%gw = call aten.mul.Tensor(%gv, %v) : float32[4] {1 backward}
update "copy" group 0 %b from %gv
update "SGD" group 0 %v from %gv
update "Adam" group 0 %w from %gw whole
output "loss" %l
"""


def test_scale_and_unscale() -> None:
    graph = verify(unscale(verify(scale_loss(parse_graph(GRAPH), NOTHING)), NOTHING))
    assert graph.producers["s"].uses == ("s.ones", SCALE)
    updates = {update.target.name: update for update in graph.of_kind(Update)}
    assert list(updates) == ["b", "v", "w", SCALE, TRACKER]
    assert {name: one.source.name for name, one in updates.items()} == {
        "b": "gv",
        "v": "gv.scaled",
        "w": "gw.scaled",
        SCALE: "scaled.scale",
        TRACKER: "scaled.growth_tracker",
    }
    flag = updates["v"].skip
    assert flag is not None
    assert flag == updates["w"].skip
    assert updates["b"].skip is updates[SCALE].skip is None
    # One flag over both stages.
    assert (graph.producers[f"{flag.name}.each"]).uses == ("scaled.gv", "scaled.gw")
    assert graph.producers["scaled.scale"].uses == (SCALE, TRACKER, flag.name)
    stages = {call.outputs[0].name: call.phase.stage for call in graph.of_kind(Call)}  # type: ignore[union-attr]
    assert stages["gw.scaled"] == stages["scaled.gw"] == 1
    assert stages["scaled.scale"] == 0
    assert str(parse_graph(str(graph))) == str(graph)


def test_other_graphs_stay_as_they_are() -> None:
    graph = parse_graph(GRAPH.replace("weft.loss_seed", "aten.ones_like.default"))
    assert scale_loss(graph, NOTHING) is graph
    assert unscale(graph, NOTHING) is graph
