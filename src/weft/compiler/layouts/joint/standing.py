"""The choices that an assignment stands for, among the options of a problem over all axes at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, final

import numpy as np

from weft.compiler.assignment import Assignment
from weft.compiler.layouts.boxing_costs import Table
from weft.compiler.layouts.joint.options import JointOptions
from weft.compiler.layouts.options import PerAxis
from weft.compiler.layouts.problem import Problem, Share
from weft.ir.logical import Call, Input, LogicalGraph, Output
from weft.layout import Layout

# The layouts of operands and of results; None for a result that is no tensor.
_Ports: TypeAlias = tuple[Sequence[Layout], Sequence[Layout | None]]


@final
class NoOption(Exception):
    """A layout that stands is none of the options."""


def standing(
    problem: Problem, graph: LogicalGraph, assignment: Assignment, options: Sequence[JointOptions]
) -> dict[int, int]:
    """The number of each variable's option; an assignment does not say it of what leaves for other stages.

    Args:
        problem: of the graph.
        graph: without layouts.
        assignment: its layouts.
        options: of the variables.

    Raises:
        NoOption: a layout is none of the options.
    """
    node_of = {place: number for number, place in problem.variable_of.items()}
    found: dict[int, int] = {}
    for place, variable in enumerate(problem.variables):
        if isinstance(variable, Share):
            layout = assignment.shared.get(variable.value) or assignment.values[variable.value]
            found[place] = _number(options[place], ((layout,), (layout,)))
        elif place in node_of:
            ports = _ports(graph, node_of[place], assignment)
            found[place] = _number(options[place], ports)
    return found


def with_rest(
    found: Mapping[int, int], unary: Sequence[Table], pairwise: Mapping[tuple[int, int], Table]
) -> list[int]:
    """Choices of all variables: those that are not known are the cheapest beside those that are."""
    around: dict[int, Table] = {
        place: own.copy() for place, own in enumerate(unary) if place not in found
    }
    for (source, target), table in pairwise.items():
        if target in around and source in found:
            around[target] += table[found[source]]
        if source in around and target in found:
            around[source] += table[:, found[target]]
    return [
        found[place] if place in found else int(np.argmin(around[place]))
        for place in range(len(unary))
    ]


def _ports(graph: LogicalGraph, number: int, assignment: Assignment) -> _Ports:
    node = graph.nodes[number]
    if isinstance(node, Input):
        layout = assignment.values[node.value.name]
        return (layout,), (layout,)
    operands = assignment.operands[number]
    if isinstance(node, Output):
        return operands, ()
    assert isinstance(node, Call)
    return operands, [assignment.values[each.name] if each else None for each in node.outputs]


def _number(options: JointOptions, ports: _Ports) -> int:
    for number, every in enumerate(options.signatures):
        if _fits(every, ports):
            return number
    raise NoOption


def _fits(every: PerAxis, ports: _Ports) -> bool:
    operands, results = ports
    return all(
        _same(one.operands, operands, axis) and _same(one.results, results, axis)
        for axis, one in enumerate(every)
    )


def _same(sbps: Iterable[object], layouts: Sequence[Layout | None], axis: int) -> bool:
    return all(
        layout is None or layout.sbp[axis] == sbp
        for sbp, layout in zip(sbps, layouts, strict=False)
    )
