"""Deduction: the cheapest layouts in total, hints as fixed points, strategies that keep their meaning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import ref
from strategies import law
from weft.boxing import EXCHANGES, steps
from weft.compiler.assignment import Assignment
from weft.compiler.hints import Hints
from weft.compiler.layouts import coordinate_descent
from weft.compiler.layouts.box import deduce
from weft.compiler.layouts.boxing_costs import BoxingCosts
from weft.compiler.layouts.intent import uses
from weft.compiler.layouts.options import Known, LayoutChoice
from weft.compiler.layouts.options import start as first_choice
from weft.compiler.layouts.problem import OpChoice, Problem, build
from weft.compiler.layouts.solver import Solution, minimize
from weft.errors import LayoutError, RuleError
from weft.hardware import CostModel
from weft.ir import LogicalGraph, parse_graph
from weft.ir.logical import Call, Hint, Input, Location, Node, Output, Role, Update, Value
from weft.ir.nodes import renamed
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split, parse_sbp, placement
from weft.ops import OpCall, Operand, Signature, TensorSpec, flops, localize, signatures, traffic
from weft.units import ITEM_SIZE, Bytes, Flops

B, S0, S1, P = Broadcast(), Split(0), Split(1), Partial()
PAIR = placement("cpu", [0, 1])
SQUARE = placement("cpu", [[0, 1], [2, 3]])
# Bytes and flops only: no charge for departing from how a parameter is laid.
PLAIN = CostModel(bytes_per_held=0.0, whole_parameter=0.0, hints_hold=False, early_reduction=0)
HERE = Location("model.py", 7)


@dataclass
class Build:
    """A graph in the making."""

    inputs: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    tail: list[Node] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[int, ...], role: Role = "batch") -> str:
        self.shapes[name] = shape
        self.inputs.append(Input(Value(name, shape, "float32"), role, name))
        return name

    def call(self, op: str, name: str, shape: tuple[int, ...], *args: object) -> str:
        """Strings among `args` name values."""
        self.shapes[name] = shape
        read = tuple(
            ref(a, *self.shapes[a]) if isinstance(a, str) and a in self.shapes else a for a in args
        )
        self.calls.append(Call.of(op, read, (Value(name, shape, "float32"),), location=HERE))  # type: ignore[arg-type]
        return name

    def mm(self, name: str, a: str, b: str) -> str:
        return self.call("aten.mm.default", name, (self.shapes[a][0], self.shapes[b][1]), a, b)

    def t(self, name: str, a: str) -> str:
        return self.call("aten.t.default", name, self.shapes[a][::-1], a)

    def update(self, target: str, source: str, states: Sequence[str] = (), **more: bool) -> None:
        refs = tuple(ref(state) for state in states)
        self.tail.append(Update("SGD", ref(target), ref(source), refs, **more))

    def graph(self, *outputs: str) -> LogicalGraph:
        ends = [Output(ref(name), name) for name in outputs]
        return LogicalGraph("test", (*self.inputs, *self.calls, *self.tail, *ends))


def mlp(batch: int, *widths: int) -> LogicalGraph:
    """A training step of an MLP with weights of (in, out): forward, a sum as the loss, backward, updates."""
    b = Build()
    last = len(widths) - 2
    b.input("x", (batch, widths[0]))
    for i, shape in enumerate(pairwise(widths)):
        b.input(f"w{i}", shape, "parameter")
    hidden = ["x"]
    for i in range(last + 1):
        z = b.mm(f"z{i}", hidden[-1], f"w{i}")
        hidden.append(b.call("aten.relu.default", f"h{i}", b.shapes[z], z))
    b.call("aten.sum.default", "loss", (), z)
    g = b.call("aten.expand.default", f"g{last}", b.shapes[z], "loss", b.shapes[z])
    for i in reversed(range(last + 1)):
        b.mm(f"dw{i}", b.t(f"xt{i}", hidden[i]), g)
        b.update(f"w{i}", f"dw{i}")
        if i:
            dh = b.mm(f"dh{i}", g, b.t(f"wt{i}", f"w{i}"))
            g = b.call(
                "aten.threshold_backward.default", f"g{i - 1}", b.shapes[dh], dh, hidden[i], 0
            )
    return b.graph("loss")


def sbp(found: Assignment, *names: str) -> list[str]:
    return [", ".join(map(str, found.values[name].sbp)) for name in names]


def collectives(graph: LogicalGraph, found: Assignment) -> list[str]:
    """Names of the values that are boxed by communication, with the kinds of the steps."""
    seen = {}
    for number, node in enumerate(graph.nodes):
        for name, layout in zip(
            dict.fromkeys(node.uses), found.operands.get(number, ()), strict=True
        ):
            value = graph.values[name]
            chain = steps(found.values[name], layout, value.shape, ITEM_SIZE[value.dtype])
            kinds = [step.kind for step in chain if step.kind in EXCHANGES]
            seen[name, tuple(kinds)] = f"{name} {' '.join(kinds)}"
    return sorted(text for (_, kinds), text in seen.items() if kinds)


# ---------------------------------------------------------------- named strategies


@pytest.mark.parametrize("batch", [2, 64, 4096])
@pytest.mark.parametrize("hinted", [True, False])
def test_data_parallel_at_any_batch(batch: int, hinted: bool) -> None:
    graph = mlp(batch, 32, 256, 256, 16)
    weights = {f"w{i}": (B,) for i in range(3)} if hinted else {}
    found = deduce(graph, Hints({"x": (S0,), **weights}), PAIR)
    assert sbp(found, "z0", "h0", "z1", "h1", "z2", "g0", "g1") == ["S(0)"] * 7
    assert sbp(found, "dw0", "dw1", "dw2", "loss") == ["P(sum)"] * 4
    assert sbp(found, "w0", "w1", "w2") == ["B"] * 3
    assert collectives(graph, found) == [
        f"{name} all_reduce" for name in ("dw0", "dw1", "dw2", "loss")
    ]
    assert found.proven


def test_output_layer_split_by_columns_as_in_oneflows_manual() -> None:
    graph = mlp(64, 32, 256, 256, 16)
    found = deduce(graph, Hints({"x": (S0,), "w2": (S1,)}), PAIR)
    assert sbp(found, "z0", "h0", "z1", "h1", "z2") == ["S(0)"] * 4 + ["S(1)"]
    assert sbp(found, "dw0", "dw1", "dw2") == ["P(sum)", "P(sum)", "S(1)"]
    assert collectives(graph, found) == [
        "dh2 reduce_scatter",
        "dw0 all_reduce",
        "dw1 all_reduce",
        "h1 all_gather",
        "loss all_reduce",
    ]
    assert found.shared["h1"].sbp == (B,)


def test_a_split_weight_is_used_where_it_lies_at_a_large_batch() -> None:
    graph = mlp(4096, 32, 256, 256, 64)
    found = deduce(graph, Hints({"x": (S0,), "w2": (S1,)}), PAIR)
    assert sbp(found, "h1", "z2") == ["S(0)", "S(1)"]
    assert not any(text.startswith(("w2", "wt2")) for text in collectives(graph, found))


def test_the_layer_after_a_column_split_is_split_by_rows() -> None:
    """What Megatron-LM does by hand, found from the hint for the first layer alone, as its activations are large."""
    graph = mlp(65536, 64, 256, 64)
    found = deduce(graph, Hints({"x": (B,), "w0": (S1,)}), PAIR)
    assert sbp(found, "w0", "h0", "w1", "z1") == ["S(1)", "S(1)", "S(0)", "P(sum)"]


def test_hybrid_on_a_grid() -> None:
    graph = mlp(512, 32, 256, 256, 64)
    hints = Hints({"x": (S0, B), "w1": (B, S1), "w0": (B, B), "w2": (B, B)})
    found = deduce(graph, hints, SQUARE)
    assert sbp(found, "z1", "w1", "dw1") == ["S(0), S(1)", "B, S(1)", "P(sum), S(1)"]
    assert all(found.values[name].sbp[0] == S0 for name in ("z0", "h0", "z1", "h1", "z2"))


def test_bytes_alone_gather_a_split_weight_for_a_large_batch() -> None:
    graph = mlp(4096, 32, 256, 256, 64)
    found = deduce(graph, Hints({"x": (S0,), "w2": (S1,)}), PAIR, PLAIN)
    assert sbp(found, "z2") == ["S(0)"]
    assert "w2 all_gather" in collectives(graph, found)


# ---------------------------------------------------------------- totals


def total_cost(graph: LogicalGraph, found: Assignment, where: Placement) -> float:
    """Cost of an assignment by the definition: each call's work on all devices, each boxing once."""
    cost = sum(work(graph, number, node, found, where) for number, node in enumerate(graph.nodes))
    for name, value in graph.values.items():
        size = ITEM_SIZE[value.dtype]
        start = found.shared.get(name, found.values[name])
        cost += boxing(found.values[name], start, value.shape, size)
        for number, node in enumerate(graph.nodes):
            names = tuple(dict.fromkeys(node.uses))
            if name in names and not (isinstance(node, Update) and name == node.target.name):
                wanted = found.operands[number][names.index(name)]
                cost += boxing(start, wanted, value.shape, size)
    return cost


def boxing(source: Layout, target: Layout, shape: tuple[int, ...], size: int) -> float:
    chain = steps(source, target, shape, size)
    return sum(PLAIN.boxing(step.bytes, step.kind in EXCHANGES) for step in chain)


def work(
    graph: LogicalGraph, number: int, node: Node, found: Assignment, where: Placement
) -> float:
    if not isinstance(node, Call):
        return 0.0
    call = node.first
    results = [found.values[value.name] for value in node.outputs if value]
    for axis, parts in enumerate(where.shape):
        operands = tuple(layout.sbp[axis] for layout in found.operands[number])
        made = tuple(layout.sbp[axis] for layout in results)
        fit = [s for s in signatures(call, parts) if (s.operands, s.results) == (operands, made)]
        assert fit, f"{node.op}: {operands} -> {made} is not legal"
        call = localize(call, fit[0], parts, 0)
    devices = len(where.ranks)
    return PLAIN.work(Flops(devices * flops(call)), Bytes(devices * traffic(call)))


def random_graph(seed: int) -> LogicalGraph:
    """A few products, sums and transposes of matrices of different shapes."""
    rng = random.Random(seed)
    b = Build()
    b.input("x", (rng.choice([4, 64]), rng.choice([4, 64])))
    b.input("w0", (rng.choice([4, 64]), rng.choice([4, 64])), "parameter")
    for i in range(3):
        one, other = rng.choices(list(b.shapes), k=2)
        if b.shapes[one][1] == b.shapes[other][0] and one != other:
            b.mm(f"v{i}", one, other)
        elif b.shapes[one] == b.shapes[other]:
            b.call("aten.add.Tensor", f"v{i}", b.shapes[one], one, other)
        else:
            b.t(f"v{i}", one)
    b.update("w0", next((n for n in reversed(b.shapes) if b.shapes[n] == b.shapes["w0"]), "w0"))
    return b.graph(list(b.shapes)[-1])


def brute_force(graph: LogicalGraph, where: Placement) -> float:
    """Least total cost over every choice of input SBPs, signatures, and shared layouts."""
    names = [node.value.name for node in graph.of_kind(Input)]
    calls = [(i, n) for i, n in enumerate(graph.nodes) if isinstance(n, Call)]
    free = [[B, S0] if name == "x" else [B, S0, S1] for name in names]
    legal = [signatures(node.first, where.shape[0]) for _, node in calls]
    best = float("inf")
    for sbps in product(*free):
        for chosen in product(*legal):
            values = dict(zip(names, sbps, strict=True))
            operands: dict[int, tuple[SBP, ...]] = {}
            for (number, node), signature in zip(calls, chosen, strict=True):
                operands[number] = signature.operands
                values |= {
                    v.name: r for v, r in zip(node.outputs, signature.results, strict=True) if v
                }
            best = min(best, finished(graph, where, values, operands))
    return best


def finished(
    graph: LogicalGraph,
    where: Placement,
    values: dict[str, SBP],
    operands: dict[int, tuple[SBP, ...]],
) -> float:
    """Cost of given signatures, with each value shared in the layout that suits its readers best."""
    whole = {name: Layout(where, (sbp,)) for name, sbp in values.items()}
    readers = {
        number: tuple(Layout(where, (s,)) for s in every) for number, every in operands.items()
    }
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Update):
            readers[number] = (whole[node.target.name],) * len(dict.fromkeys(node.uses))
        elif isinstance(node, Output):
            readers[number] = (Layout(where, (B,)),)
    base = Assignment(whole, readers)
    cost = sum(work(graph, number, node, base, where) for number, node in enumerate(graph.nodes))
    for name, value in graph.values.items():
        wants = wanted(graph, readers, name)
        via = {whole[name], *wants, Layout(where, (B,))} if len(wants) > 1 else {whole[name]}
        cost += min(
            boxing(whole[name], once, value.shape, 4)
            + sum(boxing(once, layout, value.shape, 4) for layout in wants)
            for once in via
        )
    # Splitting a parameter that was left free weighs as much as a collective: it decides ties.
    parameters = [n.value.name for n in graph.of_kind(Input) if n.role == "parameter"]
    split = sum(isinstance(values[name], Split) for name in parameters)
    return cost + split * PLAIN.bytes_per_collective


def wanted(graph: LogicalGraph, readers: dict[int, tuple[Layout, ...]], name: str) -> list[Layout]:
    """The layouts in which the nodes read a value; the target of an update stays where it is."""
    found = []
    for number, node in enumerate(graph.nodes):
        names = list(dict.fromkeys(node.uses))
        if name in names and not (isinstance(node, Update) and name == node.target.name):
            found.append(readers[number][names.index(name)])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed: int) -> None:
    graph = random_graph(seed)
    found = deduce(graph, Hints(), PAIR, PLAIN)
    assert found.proven
    assert found.cost == pytest.approx(brute_force(graph, PAIR))


@pytest.mark.parametrize("seed", range(6))
def test_on_a_grid_the_cost_is_that_of_the_assignment(seed: int) -> None:
    graph = random_graph(seed)
    found = deduce(graph, Hints({"x": (S0, None)}), SQUARE, PLAIN)
    # Of the charges for free parameters that are split, the cost holds those of the last axis.
    ties = isinstance(found.values["w0"].sbp[-1], Split) * PLAIN.bytes_per_collective
    assert found.cost == pytest.approx(total_cost(graph, found, SQUARE) + ties)
    alone = deduce(graph, Hints({"x": (S0, B)}), SQUARE, PLAIN)
    assert found.cost <= alone.cost * (1 + 1e-12)


def solved(
    problem: Problem,
    known: Known,
    axis: int,
    choice: LayoutChoice,
    solver: Callable[..., Solution],
) -> LayoutChoice:
    """The choice after an axis is solved by a solver of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinate_descent, "minimize", solver)
        return coordinate_descent.solve(problem, known, (axis,), choice)


def solution(choices: Sequence[int], unary: list[Any], pairwise: dict[Any, Any]) -> Solution:
    """Choices that nothing is proven of, with their cost."""
    own = sum(float(table[c]) for table, c in zip(unary, choices, strict=True))
    pairs = (float(table[choices[i], choices[j]]) for (i, j), table in pairwise.items())
    return Solution(tuple(choices), own + sum(pairs), 0.0)


@law(30)
@given(st.integers(0, 9999), st.integers(0, 9999), st.integers(1, 8))
def test_no_axis_is_solved_worse_than_it_stands(seed: int, start: int, limit: int) -> None:
    """From random signatures on, with tables so small that nothing is proven."""
    grid, rng = SQUARE.shape, random.Random(start)
    problem = build(random_graph(seed), Hints(), SQUARE)
    known = Known(grid, CostModel())

    def anything(unary: Any, pairwise: Any, **_: Any) -> Solution:
        return solution([rng.randrange(len(table)) for table in unary], unary, pairwise)

    def as_it_stands(unary: Any, pairwise: Any, starts: Iterator[Any]) -> Solution:
        (choices,) = starts  # what an axis has is among its options
        return solution(choices, unary, pairwise)

    choice = LayoutChoice(tuple(first_choice(each, len(grid)) for each in problem.variables))
    for axis in (0, 1):
        choice = solved(problem, known, axis, choice, anything)
    for axis in (1, 0, 1):
        before = solved(problem, known, axis, choice, as_it_stands)
        assert before.signatures == choice.signatures
        choice = solved(problem, known, axis, choice, partial(minimize, limit=limit))
        cost, most = choice.cost, before.cost + 1e-9 * abs(before.cost)
        assert (choice.broken, cost) <= (before.broken, most)


def test_outer_axes_are_solved_again_once_inner_ones_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, hints = random_graph(5), Hints({"x": (None, S1)})
    settled = deduce(graph, hints, SQUARE, PLAIN)
    monkeypatch.setattr(coordinate_descent, "ROUNDS", 1)
    assert settled.cost < deduce(graph, hints, SQUARE, PLAIN).cost


def test_no_option_breaks_what_a_later_axis_has_chosen() -> None:
    """Six rows merged into a view may be split over 2 ranks, but their 3 rows not again."""
    view = OpCall(
        "aten.view.default",
        (Operand(0), (24,)),
        (),
        (TensorSpec((6, 4), "float32"),),
        (TensorSpec((24,), "float32"),),
    )
    rows, whole = Signature((S0,), (S0,)), Signature((B,), (B,))
    known = Known((2, 2), PLAIN)
    work = OpChoice(view, Call.of(view.op, (), ()))
    options = known.of(work, (0,), (whole, whole)).signatures
    assert options[:2] == ((whole, whole), (rows, whole))
    both = rows, rows
    assert both not in known.of(work, (0,), (whole, rows)).signatures
    assert both not in known.of(work, (1,), (rows, whole)).signatures
    assert both not in known.of(work, (0, 1), (whole, whole)).signatures


@pytest.mark.parametrize("grid", [(4,), (2, 2), (2, 3), (2, 2, 2)])
def test_tables_of_boxing_equal_the_chains(grid: tuple[int, ...]) -> None:
    where = Placement("cpu", grid, tuple(range(int(np.prod(grid)))))
    shape, costs = (48, 96), BoxingCosts(grid, CostModel(bytes_per_held=0.0))
    rng, every = random.Random(0), list[SBP]([B, P, S0, S1])
    for _ in range(40):
        source, target = (tuple(rng.choices(every, k=len(grid))) for _ in range(2))
        table = costs.table(TensorSpec(shape, "float32"), (source,), (target,))
        chain = boxing(Layout(where, source), Layout(where, target), shape, 4)
        assert table.item() == chain


def test_boxing_that_makes_a_tensor_whole_is_dearer() -> None:
    costs = BoxingCosts((4,), CostModel(bytes_per_collective=0.0, bytes_per_held=0.5))
    spec, every = TensorSpec((8, 4), "float32"), ((B,), (P,), (S0,))
    table = costs.table(spec, every, every)
    size = 8 * 4 * 4
    assert table.tolist() == [
        [0.0, 0.0, 0.0],
        [6.0 * size, 0.0, 3.0 * size],
        [(3.0 + 1.5) * size, 1.5 * size, 0.0],
    ]


def test_tables_of_boxing_are_remembered_by_grid_and_cost_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(grid: tuple[int, ...], collective: float) -> list[list[float]]:
        costs = BoxingCosts(grid, CostModel(bytes_per_collective=collective))
        ends = (B,), (P,), (S0,)
        found: list[list[float]] = costs.table(TensorSpec((9, 5), "float32"), ends, ends).tolist()
        return found

    def fail(*_: object) -> None:
        raise AssertionError("made anew")

    found = table((4,), 1.0)
    monkeypatch.setattr("weft.compiler.layouts.boxing_costs.grid_moves", fail)
    assert table((4,), 1.0) == found
    for grid, collective in (((3,), 1.0), ((4,), 2.0)):
        with pytest.raises(AssertionError, match="made anew"):
            table(grid, collective)


# ---------------------------------------------------------------- several deductions that know each other's


def named(graph: LogicalGraph, prefix: str) -> LogicalGraph:
    """The same graph with other names of values."""
    names = {name: f"{prefix}{name}" for name in graph.values}

    def node(each: Node) -> Node:
        if isinstance(each, Input):
            return replace(each, value=replace(each.value, name=names[each.value.name]))
        each = renamed(each, names)
        if isinstance(each, Update):
            return replace(each, target=ref(names[each.target.name]))
        if isinstance(each, Call):
            made = tuple(v and replace(v, name=names[v.name]) for v in each.outputs)
            return each.changed(outputs=made)
        return each

    return replace(graph, nodes=tuple(map(node, graph.nodes)))


@pytest.mark.parametrize("where", [PAIR, SQUARE])
def test_what_other_deductions_know_changes_nothing(where: Placement) -> None:
    known = Known(where.shape, CostModel())
    hints = [Hints({"x": (S0, None)[: where.axes]}), Hints({"w0": (S1, B)[: where.axes]})]
    graphs = [mlp(8, 16, 32, 8), mlp(64, 16, 32, 8), named(mlp(8, 16, 32, 8), "b")]
    # The same tensors and edges, but another op.
    others = [
        node.changed(op="aten._softmax.default", args=(*node.args, 1, False))
        if isinstance(node, Call) and node.op == "aten.relu.default"
        else node
        for node in graphs[0].nodes
    ]
    graphs.append(replace(graphs[0], nodes=tuple(others)))
    for graph, hint in product(graphs, hints):
        assert deduce(graph, hint, where, known=known) == deduce(graph, hint, where)


def test_equal_problems_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known, solved = Known((2,), CostModel()), list[int]()
    solve = coordinate_descent.solve
    monkeypatch.setattr(coordinate_descent, "solve", lambda *a: solved.append(1) or solve(*a))
    first = deduce(mlp(8, 16, 8), Hints({"x": (S0,)}), PAIR, known=known)
    count = len(solved)
    again = deduce(named(mlp(8, 16, 8), "other"), Hints({"x": (S0,)}), PAIR, known=known)
    assert len(solved) == count
    assert again.values == {f"other{name}": layout for name, layout in first.values.items()}
    deduce(mlp(16, 16, 8), Hints({"x": (S0,)}), PAIR, known=known)
    deduce(mlp(8, 16, 8), Hints({"x": (B,)}), PAIR, known=known)
    assert len(solved) >= count + 2


# ---------------------------------------------------------------- inputs, states, updates, hints in code


def adam(elementwise: bool) -> LogicalGraph:
    b = Build()
    b.input("step", (), "state")
    b.input("moment", (8, 4), "state")
    b.input("w", (8, 4), "parameter")
    b.input("g", (8, 4))
    b.call("aten.relu.default", "y", (8, 4), "g")
    b.update("w", "y", ["moment", "step"], elementwise=elementwise)
    return b.graph()


def test_states_follow_their_parameter() -> None:
    found = deduce(adam(True), Hints({"w": (S1,), "g": (B,)}), PAIR)
    assert sbp(found, "w", "moment", "step") == ["S(1)", "S(1)", "B"]
    layouts = list(found.operands.values())[-1]
    assert [layout.sbp for layout in layouts] == [(S1,), (S1,), (S1,), (B,)]


def test_an_update_of_the_whole_tensor_keeps_all_whole() -> None:
    found = deduce(adam(False), Hints({"g": (S0,)}), PAIR)
    assert sbp(found, "w", "moment") == ["B", "B"]
    found = deduce(adam(False), Hints({"w": (S0,)}, whole=frozenset("w")), PAIR)
    assert sbp(found, "w", "moment") == ["B", "B"]


def hinted(text: str) -> LogicalGraph:
    b = Build()
    b.input("x", (8, 4))
    b.call("aten.relu.default", "a", (8, 4), "x")
    b.call("weft.hint", "b", (8, 4), "a")
    b.calls[-1] = replace(b.calls[-1], hint=Hint(tuple(map(parse_sbp, text.split(",")))))
    return b.graph("b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("S(1)", "S(1), S(1)"), ("S(0),B", "S(0), B"), ("S(-1), P(sum)", "S(1), P(sum)")],
)
def test_a_hint_in_the_code_fixes_its_value(text: str, expected: str) -> None:
    graph = hinted(text)
    found = deduce(graph, Hints({"x": (B, B)}), SQUARE)
    assert sbp(found, "b") == [expected]
    assert [str(one) for one in found.operands[2][0].sbp] == expected.split(", ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S(2)", r"model.py:7 splits dimension 2, but the tensor of shape \[8, 4\]"),
        ("S(0),B,B", "one SBP for each of the 2 axes"),
        ("P(xor)", r"at model.py:7: P\(xor\) has no meaning for float32, which takes sum, max"),
    ],
)
def test_a_wrong_hint_in_the_code_names_its_line(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        deduce(hinted(text), Hints(), SQUARE)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": (Split(2),)}, r"'x' splits dimension 2, but the tensor of shape \[8, 4\]"),
        ({"x": (S0, S0)}, "one SBP for each of the 1 axes"),
        ({"y": (S0,)}, "'y' names no input"),
        ({"x": (P,)}, r"split or broadcast, got P\(sum\)"),
    ],
)
def test_a_hint_that_cannot_hold_names_its_key(
    inputs: dict[str, tuple[SBP | None, ...]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        deduce(hinted("B"), Hints(inputs), PAIR)


def test_more_pieces_than_elements_are_kept_along_their_dimension() -> None:
    """4 columns on 2 x 3 ranks; without the hint, no axis splits what another has used up."""
    where = placement("cpu", [[0, 1, 2], [3, 4, 5]])
    b = Build()
    b.input("x", (8, 4))
    b.call("aten.relu.default", "y", (8, 4), "x")
    b.call("aten.mul.Tensor", "z", (8, 4), "x", "y")
    graph = b.graph()
    found = deduce(graph, Hints({"x": (S1, S1)}), where)
    assert sbp(found, "x", "y", "z") == ["S(1), S(1)"] * 3
    found = deduce(graph, Hints({"x": (S1, B)}), where)
    assert "S(1), S(1)" not in sbp(found, "x", "y", "z")


def test_no_split_leaves_ranks_empty_unless_a_hint_does() -> None:
    where = placement("cpu", [0, 1, 2, 3])
    b = Build()
    b.input("x", (3, 2), "batch")
    b.call("aten.relu.default", "y", (3, 2), "x")
    graph = b.graph()
    assert not {"S(0)", "S(1)"} & set(sbp(deduce(graph, Hints(), where), "x", "y"))
    assert sbp(deduce(graph, Hints({"x": (S0,)}), where), "x", "y") == ["S(0)", "S(0)"]


def test_a_hint_that_no_signature_satisfies_is_reached_by_boxing() -> None:
    b = Build()
    b.input("x", (8, 4))
    b.call("aten._softmax.default", "y", (8, 4), "x", 1, False)
    found = deduce(b.graph(), Hints({"x": (S1,)}), PAIR)
    assert sbp(found, "x", "y") == ["S(1)", "S(0)"]


def test_an_op_without_rule_names_op_and_line() -> None:
    b = Build()
    b.input("x", (8, 4))
    b.call("custom.frobnicate.default", "y", (8, 4), "x")
    with pytest.raises(RuleError, match=r"model.py:7: the op custom.frobnicate.default"):
        deduce(b.graph(), Hints(), PAIR)


def test_an_axis_of_one_rank_is_broadcast() -> None:
    found = deduce(mlp(8, 4, 4), Hints({"x": (S0,)}), placement("cpu", [0]))
    assert sbp(found, "x", "z0", "w0") == ["S(0)", "B", "B"]


def test_a_value_that_is_read_twice_is_one_operand() -> None:
    b = Build()
    b.input("x", (4, 4))
    b.call("aten.mul.Tensor", "y", (4, 4), "x", "x")
    graph = b.graph()
    call = graph.of_kind(Call)[0].first
    assert call.args == (Operand(0), Operand(0))
    assert call.operands == (TensorSpec((4, 4), "float32"),)
    assert graph.of_kind(Call)[0].operands == ("x",)


def test_the_same_graph_gives_the_same_layouts() -> None:
    graph = mlp(64, 32, 64, 16)
    one, two = (deduce(graph, Hints({"x": (S0, None)}), SQUARE) for _ in range(2))
    assert one == two


def test_a_deep_model_takes_seconds() -> None:
    found = deduce(mlp(512, *[64] * 150), Hints({"x": (S0, None)}), SQUARE)
    assert found.proven


def test_a_repeated_parameter_is_an_activation() -> None:
    """A token that each sequence has is one parameter, but as many activations: it may be split with the batch."""
    graph = parse_graph(
        'graph "tokens"\n'
        '%token = parameter "token" : float32[1, 1, 8]\n'
        '%x = batch "x" : float32[4, 3, 8]\n'
        "%moved = call aten.view.default(%token, [1, 8]) : float32[1, 8]\n"
        "%each = call aten.expand.default(%token, [4, -1, -1]) : float32[4, 1, 8]\n"
        "%y = call aten.cat.default([%each, %x], 1) : float32[4, 4, 8]\n"
        'output "y" %y\n'
        'output "moved" %moved\n'
    )
    assert uses(graph, {"token": None}) == {"token": "token", "moved": "token"}
