"""Sharding on a small graph: where gathers stand, and which parameters stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from build import ref
from contexts import hinted
from weft.compiler.context import Context, Options, Stages
from weft.compiler.hints import Hints
from weft.compiler.pipeline import compile_graph
from weft.compiler.training.gathers import block_of
from weft.compiler.training.shards import choose_shards, shard_variables
from weft.errors import StrategyError
from weft.ir import parse_graph, verify
from weft.ir.logical import Box, Call, Input, LogicalGraph
from weft.layout import Broadcast, Placement, Split
from weft.strategy.parts import Zero

PAIR = Placement("cpu", (2,), (0, 1))
SQUARE = Placement("cpu", (2, 2), (0, 1, 2, 3))

# A linear layer without a gradient for its input, as autograd leaves it under autocast.
LAYER = """
graph "layer"
%w = parameter "fc.weight" : float32[6, 4]
%b = parameter "fc.bias" : float32[6]
%n = parameter "fc.scale" : float32[]
%x = batch "x" : bfloat16[8, 4]
%half = call aten._to_copy.default(%w, dtype=!dtype:bfloat16) : bfloat16[6, 4] at "m.py":1 in "fc"
%t = call aten.t.default(%half) : bfloat16[4, 6] at "m.py":1 in "fc"
%y = call aten.mm.default(%x, %t) : bfloat16[8, 6] at "m.py":1 in "fc"
%z = call aten.add.Tensor(%y, %b) : float32[8, 6] at "m.py":1 in "last"
%s = call aten.mul.Tensor(%z, %n) : float32[8, 6] at "m.py":1 in "fc"
%gy = call aten._to_copy.default(%s, dtype=!dtype:bfloat16) : bfloat16[8, 6] {0 backward} at "m.py":1 in "fc" backward
%gx = call aten.mm.default(%gy, %half) : bfloat16[8, 4] {0 backward} at "m.py":1 in "fc" backward
%gz = call aten.mm.default(%gx, %t) : bfloat16[8, 6] {0 backward} at "m.py":1 in "fc" backward
%gt = call aten.t.default(%gz) : bfloat16[6, 8] {0 backward} at "m.py":1 in "fc" backward
%gh = call aten.mm.default(%gt, %x) : bfloat16[6, 4] {0 backward} at "m.py":1 in "fc" backward
%gw = call aten._to_copy.default(%gh, dtype=!dtype:float32) : float32[6, 4] {0 backward} at "m.py":1 in "fc" backward
%gb = call aten.sum.dim_IntList(%s, [0]) : float32[6] {0 backward} at "m.py":1 in "fc" backward
%gn = call aten.sum.default(%s) : float32[] {0 backward} at "m.py":1 in "fc" backward
update "SGD" group 0 %w from %gw
update "SGD" group 0 %b from %gb
update "SGD" group 0 %n from %gn
"""
HINTS = {"x": (Split(0),), "fc.weight": (Broadcast(),), "fc.bias": (Broadcast(),)}


def layer() -> LogicalGraph:
    return verify(parse_graph(LAYER))


def chosen(zero: Zero, placement: Placement = PAIR, hints: Hints | None = None) -> Context:
    return choose_shards(layer(), hinted(placement, (hints or Hints()).inputs, zero=zero))


def sharded(graph: LogicalGraph, zero: Zero) -> LogicalGraph:
    return verify(shard_variables(graph, choose_shards(graph, hinted(PAIR, zero=zero))))


def chain(graph: LogicalGraph, name: str) -> list[str]:
    """The ops from a parameter to a value."""
    ops = []
    node = graph.producers[name]
    while isinstance(node, Call):
        ops.append(node.op)
        node = graph.producers[node.args[0].name]  # type: ignore[union-attr]
    return ops[::-1]


def operand(graph: LogicalGraph, name: str, position: int) -> str:
    call = graph.producers[name]
    assert isinstance(call, Call)
    return call.args[position].name  # type: ignore[union-attr, no-any-return]


def test_level_1_gathers_the_cast_once() -> None:
    graph = sharded(layer(), Zero(1))
    assert chain(graph, operand(graph, "y", 1)) == [
        "aten._to_copy.default",
        "weft.hint",
        "aten.t.default",
    ]
    # The backward reads the same.
    assert operand(graph, "gz", 1) == operand(graph, "y", 1)
    assert operand(graph, "gx", 1) == operand(graph, operand(graph, "y", 1), 0)
    assert "half" not in graph.values


def test_level_3_gathers_for_each_phase() -> None:
    graph = sharded(layer(), Zero(3))
    gathered = ["aten._to_copy.default", "weft.take", "weft.hint"]
    assert chain(graph, operand(graph, "y", 1)) == [*gathered, "aten.t.default"]
    assert chain(graph, operand(graph, "gx", 1)) == gathered
    backward = operand(graph, operand(graph, "gz", 1), 0)
    assert backward == operand(graph, "gx", 1) != operand(graph, operand(graph, "y", 1), 0)
    calls = graph.of_kind(Call)
    # Each gather stands right before its first reader; both are of the one cast, before all else.
    names = [value.name for call in calls for value in call.outputs if value]
    assert names.index(backward) == names.index("gx") - 1
    weight = next(node.value.name for node in graph.of_kind(Input) if node.key == "fc.weight")
    casts = [c for c in calls if c.op == "aten._to_copy.default" and c.args[0] == ref(weight)]
    assert casts == [calls[0]]


def test_the_last_block_gathers_once_for_forward_and_backward() -> None:
    text = LAYER.replace('in "last"', 'in "fc"')
    graph = sharded(parse_graph(text), Zero(3))
    forward = operand(graph, operand(graph, "y", 1), 0)
    assert forward == operand(graph, "gx", 1) == operand(graph, operand(graph, "gz", 1), 0)


def test_what_stays_as_it_is() -> None:
    found = chosen(Zero(3))
    assert found.stored == {"fc.weight": 0, "fc.bias": 0}
    assert found.notes == ("zero: fc.scale stays as it is: no free dimension has 2 elements",)


def test_a_dimension_that_no_other_axis_splits() -> None:
    hints = Hints({"fc.weight": (None, Split(0)), "fc.bias": (Split(0), None)})
    found = chosen(Zero(1), SQUARE, hints)
    assert found.hints[2].inputs["fc.weight"] == (Split(1), Split(0))
    assert found.hints[2].inputs["fc.bias"] == (Split(0), None)
    assert "fc.bias stays as it is: the strategy splits it along axis 0 already" in found.notes[0]


def test_an_axis_that_is_missing() -> None:
    with pytest.raises(StrategyError, match=r"axis=1.* does not have; expected one of 0"):
        chosen(Zero(2, axis=1))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_boxing_of_a_compiled_layer(level: int) -> None:
    """The bf16 copy travels; the gradient is one reduce-scatter to the shard."""
    options = Options(zero=Zero(level))  # type: ignore[arg-type]
    graph = compile_graph(layer(), Hints(HINTS), PAIR, [0, 1], options).graph
    layouts = {node.key: node.value.layout for node in graph.of_kind(Input)}
    assert layouts["fc.weight"].sbp == (Split(0),)  # type: ignore[union-attr]
    boxes = [(graph.values[box.input.name], box.output) for box in graph.of_kind(Box)]
    moved = [
        (source.dtype, str(source.layout.sbp[0]), str(output.layout.sbp[0]))
        for source, output in boxes
        if source.shape == (6, 4)
    ]
    gathers = [("bfloat16", "S(0)", "B")] * (2 if level == 3 else 1)
    assert sorted(moved) == sorted([*gathers, ("bfloat16", "P(sum)", "S(0)")])


def test_an_axis_that_stages_use_up() -> None:
    rows = Stages(tuple(Placement("cpu", (1, 2), ranks) for ranks in ((0, 1), (2, 3))))
    made = choose_shards(layer(), replace(hinted(SQUARE, zero=Zero(3, 0)), stages=rows))
    assert made.stored["fc.weight"] == 1
    assert (
        made.notes[0]
        == "zero: axis 0 has one rank in each stage; parameters are sharded along axis 1"
    )
    single = Stages((Placement("cpu", (1,), (0,)), Placement("cpu", (1,), (1,))))
    made = choose_shards(layer(), replace(hinted(PAIR, zero=Zero(3, 0)), stages=single))
    assert made.stored["fc.weight"] == 0


def test_a_block_gathers_its_parameters_together() -> None:
    assert block_of("blocks.3.attention.qkv") == "blocks.3"
    assert block_of("head") == "head"
    assert block_of("encoder.norm") == "encoder"
    assert block_of("") == ""
    text = LAYER.replace('in "fc"', 'in "blocks.0.fc"').replace('in "last"', 'in "blocks.0.late"')
    found = sharded(parse_graph(text), Zero(3))
    names = [value.name for call in found.of_kind(Call) for value in call.outputs if value]
    bias = operand(found, "z", 1)
    assert bias.startswith("b.hint")
    assert names.index(bias) < names.index("y")
