"""Each rule of the legal-graph table fires on the smallest graph that breaks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import InternalError
from weft.ir import LogicalGraph
from weft.ir.legal.tables import GRAPH_RULES, LAYOUT_RULES, verify
from weft.ir.parse import parse_graph

HEAD = 'graph "g"\nplacement @0 = cpu [0, 1]\n'
PARAMETER = '%w = parameter "w" : float32[4] @0(B)\n'
GRADIENT = "%g = call aten.neg.default(%w) : float32[4] @0(B)\n"

LEGAL = (
    HEAD
    + PARAMETER
    + GRADIENT
    + "%b = box %g : float32[4] @0(S(0))\n"
    + 'update "SGD" group 0 %w from %g\n'
    + 'output "loss" %b\n'
)

BROKEN = {
    "kinds_in_order": HEAD + PARAMETER + GRADIENT + '%x = batch "x" : float32[4] @0(B)\n',
    "values_assigned_once": HEAD + PARAMETER + GRADIENT + GRADIENT,
    "values_made_before_use": HEAD
    + PARAMETER
    + "%g = call aten.neg.default(%v) : float32[4] @0(B)\n",
    "dtypes_known": HEAD + '%w = parameter "w" : quaternion[4] @0(B)\n',
    "keys_unique": HEAD + PARAMETER + PARAMETER.replace("%w", "%v"),
    "updates_write_variables": HEAD + PARAMETER + GRADIENT + 'update "SGD" group 0 %g from %w\n',
    "shares_fit": HEAD + PARAMETER.replace('"w" :', '"w" shares 0 [2, 4] 2 :'),
    "boxing_keeps_the_tensor": HEAD + PARAMETER + "%b = box %w : float32[5] @0(B)\n",
    "varying_arguments_complete": HEAD.replace('"g"', '"g" micro 3')
    + PARAMETER
    + "%s = call aten.select.int(%w, 0, vary(0, 1)) : float32[] @0(B)\n",
    "inputs_come_as_said": HEAD + PARAMETER.replace('"w" :', '"w" sent each :'),
    "hints_given": HEAD + PARAMETER + "%h = call weft.hint(%w) : float32[4] @0(B)\n",
    "kept_values_stay": HEAD
    + "%l, %t = call weft.ctc_loss(%w) : float32[] @0(B), float32[4] @0(B)\n".replace("%w", "1")
    + "%b = box %t : float32[4] @0(S(0))\n",
    "layouts_given": HEAD + '%w = parameter "w" : float32[4]\n',
    "updates_in_place": HEAD
    + PARAMETER
    + "%g = call aten.neg.default(%w) : float32[4] @0(P(sum))\n"
    + 'update "SGD" group 0 %w from %g\n',
}


def test_a_legal_graph_passes() -> None:
    graph = parse_graph(LEGAL)
    assert verify(graph, with_layouts=True) is graph


def test_a_graph_with_its_very_own_nodes_is_itself() -> None:
    graph = parse_graph(LEGAL)
    assert graph.with_nodes(list(graph.nodes)) is graph
    assert graph.with_nodes(graph.nodes[:-1]).nodes == graph.nodes[:-1]
    # Equal is not enough: 1 equals True, and is written otherwise.
    assert graph.with_nodes(map(replace, graph.nodes)) is not graph


def test_rules_that_held_do_not_stand_for_others() -> None:
    graph = verify(parse_graph(BROKEN["layouts_given"]))
    for _ in range(2):
        with pytest.raises(InternalError, match="layouts_given"):
            verify(graph, with_layouts=True)


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_fires(rule: str) -> None:
    with pytest.raises(InternalError, match=f"breaks the rule {rule}"):
        verify(parse_graph(BROKEN[rule]), with_layouts=True)


def test_every_rule_has_a_case() -> None:
    rules = {rule.__name__ for rule in GRAPH_RULES + LAYOUT_RULES}
    assert rules == {*BROKEN, "calls_know_their_tensors"}  # which text cannot break


def test_calls_have_the_shapes_of_what_they_read() -> None:
    weight, call, *ends = parse_graph(LEGAL).nodes
    wide = replace(weight, value=replace(weight.value, shape=(5,)))
    for nodes in ((wide, call), (weight, replace(call, outputs=(replace(wide.value, name="g"),)))):
        with pytest.raises(
            InternalError, match=r"calls_know_their_tensors: its (operands|results)"
        ):
            verify(LogicalGraph("g", (*nodes, *ends)))


@pytest.mark.parametrize(
    "leaf", ['parameter "x" cut : float32[1, 4]', 'batch "x" cut : float32[4]']
)
def test_only_leaves_of_the_batch_are_cut(leaf: str) -> None:
    with pytest.raises(InternalError, match="it is not a leaf of the batch in 1 micro-batches"):
        verify(parse_graph(f'graph "g"\n%x = {leaf}\n'))


def test_varying_arguments_hold_no_values() -> None:
    text = HEAD.replace('"g"', '"g" micro 2') + PARAMETER
    text += "%s = call aten.add.Tensor(%w, vary(%w, 1)) : float32[4] @0(B)\n"
    with pytest.raises(InternalError, match="holds values of the graph"):
        verify(parse_graph(text))


def test_a_layout_that_does_not_fit_the_shape_is_illegal() -> None:
    with pytest.raises(InternalError, match="splits dimension 1"):
        verify(parse_graph(HEAD + '%w = parameter "w" : float32[4] @0(S(1))\n'), with_layouts=True)
