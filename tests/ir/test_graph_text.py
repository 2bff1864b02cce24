"""Text of logical graphs: it shows what matters, and it parses back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from build import ref
from weft.errors import UserError
from weft.ir.logical import (
    Box,
    Call,
    Hint,
    Input,
    Location,
    LogicalGraph,
    Output,
    Update,
    Value,
)
from weft.ir.nodes import HINT, TAKE
from weft.ir.parse import parse_graph
from weft.layout import Broadcast, Layout, Partial, Shares, Split, placement
from weft.ops.call import Token

GRID = placement("cpu", [[0, 1], [2, 3]])


def example_graph() -> LogicalGraph:
    weight = Value("w", (20, 10), "float32", Layout(GRID, (Broadcast(), Split(0))))
    x = Value("x", (8, 20), "float32", Layout(GRID, (Split(0), Broadcast())))
    product = Value("mm", (8, 10), "float32", Layout(GRID, (Split(0), Partial())))
    boxed = Value("mm_1", (8, 10), "float32", Layout(GRID, (Broadcast(), Broadcast())))
    odd = ((boxed.ref, None, True, ()), -1, 1e-05, math.inf, -math.inf, 1 + 2j, 'say "hi"\n')
    return LogicalGraph(
        "train step",
        (
            Input(weight, "parameter", "blocks.0.fc.weight", Shares(0, (16, 4), 2)),
            Input(x, "batch", "[0].x"),
            Input(replace(x, name="cut"), "batch", "cut", cut=True, sent="each"),
            Input(replace(x, name="sent"), "batch", "sent", sent="once"),
            Call.of(
                "aten.mm.default",
                (x.ref, weight.ref),
                (product, None),
                kwargs=(("out_dtype", Token("dtype", "float32")),),
                location=Location("train.py", 12, "blocks.0.fc", backward=True),
                autograd=7,
            ),
            Call.of(
                HINT, (product.ref,), (replace(product, name="h"),), hint=Hint((Split(0), None))
            ),
            Call.of(
                TAKE,
                (weight.ref,),
                (replace(weight, name="t"),),
                autograd=3,
                hint=Hint((Split(-1),), stored=1),
            ),
            Box(ref("mm"), boxed, "loss"),
            Call.of(
                "aten.odd.default",
                odd,
                (Value("o", (), "int64"),),
                kwargs=(("device", Token("device", "cuda:0")),),
            ),
            Update("AdamW", ref("w"), ref("mm_1"), (ref("x"),), 1, elementwise=False),
            Update("copy", ref("w"), ref("mm_1")),
            Output(ref("o"), "loss"),
        ),
    )


def test_text_parses_back_to_an_equal_graph() -> None:
    graph = example_graph()
    assert parse_graph(str(graph)) == graph


def test_a_line_shows_shape_dtype_sbp_placement_and_place() -> None:
    lines = str(example_graph()).splitlines()
    assert lines[1] == "placement @0 = cpu [[0, 1], [2, 3]]"
    assert lines[6] == (
        "%mm, _ = call aten.mm.default(%x, %w, out_dtype=!dtype:float32) : "
        'float32[8, 10] @0(S(0), P(sum)), _ #7 at "train.py":12 in "blocks.0.fc" backward'
    )


def test_inputs_and_hints_say_what_they_are() -> None:
    lines = str(example_graph()).splitlines()
    assert lines[4].startswith('%cut = batch "cut" cut sent each : float32[8, 20]')
    assert lines[7].endswith(" @0(S(0), P(sum)) hint(S(0), *)")
    assert lines[8].endswith(" @0(B, S(0)) hint(S(-1)) stored 1 #3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%a = parameter", "expected a string"),
        ('%a = gradient "x" : float32[2]', "expected call, box or one of parameter"),
        ('%a = batch "x" : float32[2] @0(B)', "placement @0 is not declared"),
        ('%a = batch "x" sent twice : float32[2]', "expected one of once, each, got 'twice'"),
        ('%a = batch "x" : float32[2.5]', "whole numbers"),
        ("%a = call aten.neg.default(%x", "expected"),
        ("update 3", "expected a string"),
        ('output "x" %a %b', "unexpected '%b'"),
        ("%a = call f(&)", "cannot read '&)'"),
        ("%a = call f(nonsense) : float32[]", "unknown word 'nonsense'"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(line: str, message: str) -> None:
    with pytest.raises(UserError, match="line 2") as error:
        parse_graph(f'graph "g"\n{line}\n')
    assert message in str(error.value)


def test_nan_survives() -> None:
    graph = parse_graph('graph "g"\n%a = call aten.full.default([2], NaN) : float32[2]\n')
    (call,) = graph.of_kind(Call)
    assert math.isnan(call.args[1])
