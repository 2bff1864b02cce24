"""The clipping pass on a graph of two stages."""

from __future__ import annotations

from contexts import asked
from weft.compiler.training.gradients import clip_norm
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, Update

GRAPH = """
graph "two stages"
%v = parameter "v" : float32[4]
%w = parameter "w" : float64[4, 2]
%b = buffer "b" : float32[4]
%gw = call aten.mul.Tensor(%w, 2.0) : float64[4, 2] {1 backward}
%gv = call aten.mul.Tensor(%v, 2.0) : float32[4] {0 backward}
update "SGD" group 0 %v from %gv
update "SGD" group 0 %w from %gw
update "copy" group 0 %b from %gv
"""


def test_norm_over_two_stages() -> None:
    graph = verify(clip_norm(parse_graph(GRAPH), asked(clip_norm=1.5)))
    calls = {call.outputs[0].name: call for call in graph.of_kind(Call)}  # type: ignore[union-attr]
    assert [(name, call.phase.stage) for name, call in list(calls.items())[2:]] == [
        ("clip.gv", 0),
        ("clip.gw", 1),
        ("clip.square.all0.each", 0),
        ("clip.square.all0", 0),
        ("clip.factor", 0),
        ("gv.clip", 0),
        ("gw.clip", 1),
    ]
    assert calls["clip.square.all0.each"].uses == ("clip.gv", "clip.gw")
    assert calls["clip.factor"].args[1] == 1.5
    sources = {update.target.name: update.source.name for update in graph.of_kind(Update)}
    assert sources == {"v": "gv.clip", "w": "gw.clip", "b": "gv"}
    assert {value.dtype for name in list(calls)[2:7] for value in [graph.values[name]]} == {
        "float64"
    }


def test_nothing_to_clip() -> None:
    graph = parse_graph(GRAPH)
    assert clip_norm(graph, asked(clip_norm=None)) is graph
