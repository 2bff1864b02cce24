"""Phases, micro-batches, rates and orders in the text of both graphs: they parse back; the usual case shows none."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from build import ref
from weft.ir.logical import (
    Call,
    Input,
    Location,
    LogicalGraph,
    PerMicroBatch,
    Phase,
    PhaseKind,
    Value,
)
from weft.ir.parse import parse_graph, parse_plan
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    Order,
    Plan,
    RankPlan,
    Register,
    RegisterKind,
    Transfer,
)

phases = st.builds(Phase, st.integers(0, 9), st.sampled_from(get_args(PhaseKind)))
leaves = st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.text(max_size=3))
varying = st.builds(PerMicroBatch, st.tuples(leaves, st.tuples(leaves, leaves)))
locations = st.none() | st.builds(
    Location,
    st.just("train.py"),
    st.integers(1, 99),
    st.sampled_from(("", "blocks.0")),
    st.booleans(),
    st.none() | st.integers(0, 3),
)
names = st.sampled_from(("a", "b", "c")).map(lambda name: (name,))
once = st.integers(1, 4)
skips = st.none() | st.just("overflow")
X, Y = LocalValue("x", (2,), "float32"), LocalValue("y", (2,), "float32")
arguments = st.tuples(st.just(X.ref), st.one_of(leaves, varying, st.tuples(varying, leaves)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(arguments, phases, locations, once)
def test_a_graph_of_micro_batches_parses_back(args, phase, location, micro_batches) -> None:
    value = Value("y", (2,), "float32")
    call = Call.of(
        "aten.add.Tensor",
        args,
        (value,),
        kwargs=(("alpha", args[1]),),
        location=location,
        phase=phase,
    )
    graph = LogicalGraph(
        "g", (Input(Value("x", (2,), "float32"), "batch", "x"), call), micro_batches
    )
    assert parse_graph(str(graph)) == graph


@st.composite
def plans(draw):
    phase = draw(phases)
    nodes = (
        LocalCall.of("aten.add.Tensor", draw(arguments), (Y,), phase),
        LocalUpdate("copy", "x", "y", draw(st.just(()) | names), 0, "w", draw(phases), draw(skips)),
    )
    exchange = draw(
        st.sampled_from(
            (
                Collective("all_reduce", 0, X, Y, bytes=8, phase=phase),
                Transfer(0, None, Y, (), ((1, ((0, 2),)),), 8, phase),
            )
        )
    )
    kinds = st.sampled_from(get_args(RegisterKind))
    register = Register(X, draw(kinds), 0, (1,), draw(once), draw(st.booleans()), draw(once))
    numbers = (draw(once), draw(st.integers(-3, 3)), draw(phases))
    controls = (draw(st.just(()) | names), draw(st.just(()) | names))
    actors = (
        Compute(0, nodes, ("x",), ("y",), "compute", *numbers),
        Communicate(1, (exchange,), "comm:0", *numbers, *controls),
    )
    acts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4))
    orders = draw(st.just(()) | st.just((Order("comm:0", tuple(acts)),)))
    return Plan("p", (), (RankPlan(0, (), actors, (register,), draw(once), orders),))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans())
def test_a_plan_of_micro_batches_parses_back(plan) -> None:
    assert parse_plan(str(plan)) == plan


def test_the_lines_of_a_loop() -> None:
    call = LocalCall.of(
        "aten.select.int", (ref("x"), 0, PerMicroBatch((0, 1))), (Y,), Phase(1, "weight")
    )
    rank = RankPlan(
        3,
        (),
        (Compute(0, (call,), ("x",), ("y",), acts=2, priority=1, phase=Phase(1, "weight")),),
        (Register(Y, "activation", 0, (), 2, rate=2),),
        2,
        (Order("comm:1", ((4, 0), (4, 1))),),
    )
    assert str(rank) == (
        "rank 3 micro 2\n"
        'order "comm:1" [[4, 0], [4, 1]]\n'
        "register %y : float32[2] activation credits 2 rate 2 from 0 to []\n"
        'actor 0 on "compute" compute [%x] -> [%y] acts 2 priority 1 {1 weight}\n'
        "  %y = call aten.select.int(%x, 0, vary(0, 1)) : float32[2] {1 weight}\n"
    )
    program = LocalProgram(3, (), (call,), (), 2, frozenset("y"))
    assert str(program).splitlines()[:2] == ["local program of rank 3 micro 2", "loop %y"]


def test_one_micro_batch_and_one_stage_need_no_words() -> None:
    call = LocalCall.of("aten.neg.default", (ref("x"),), (Y,))
    rank = RankPlan(0, (), (Compute(0, (call,), ("x",), ("y",)),), (Register(Y, "batch", 0, ()),))
    assert str(rank) == (
        "rank 0\n"
        "register %y : float32[2] batch credits 1 from 0 to []\n"
        'actor 0 on "compute" compute [%x] -> [%y]\n'
        "  %y = call aten.neg.default(%x) : float32[2]\n"
    )
