"""The rules for legal IR, one table per level, checked after every pass that changed something.

The rules themselves are in `graphs.py`, `local_programs.py` and `plans.py`. Two more
checks need higher packages: `weft.compiler.signatures` asks the rules of ops about layouts, and
`verify_communicators` all ranks' communicators about a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.errors import InternalError
from weft.ir.forms import node_text
from weft.ir.legal.graphs import (
    boxing_keeps_the_tensor,
    calls_know_their_tensors,
    dtypes_known,
    hints_given,
    inputs_come_as_said,
    kept_values_stay,
    keys_unique,
    kinds_in_order,
    layouts_given,
    shares_fit,
    updates_in_place,
    updates_write_variables,
    values_assigned_once,
    values_made_before_use,
    varying_arguments_complete,
)
from weft.ir.legal.local_programs import (
    LocalFinding,
    exchanges_take_what_is_there,
    forms_are_made,
    local_arguments_complete,
    local_calls_know_their_tensors,
    local_dtypes_known,
    local_keys_unique,
    local_updates_write_variables,
    local_values_assigned_once,
    local_values_made_before_use,
    loop_complete,
)
from weft.ir.legal.plans import COPY_RULES as COPY_RULES
from weft.ir.legal.plans import PLAN_RULES as PLAN_RULES
from weft.ir.logical import LogicalGraph, Node
from weft.ir.plan import LocalProgram

# A rule yields (node, what is wrong), or (line of text, what is wrong), for each place where it does not hold.
GraphRule = Callable[[LogicalGraph], Iterator[tuple[Node, str]]]
LocalRule = Callable[[LocalProgram], Iterator[LocalFinding]]

# A logical graph.
GRAPH_RULES: tuple[GraphRule, ...] = (
    kinds_in_order,
    values_assigned_once,
    values_made_before_use,
    calls_know_their_tensors,
    dtypes_known,
    keys_unique,
    updates_write_variables,
    shares_fit,
    boxing_keeps_the_tensor,
    varying_arguments_complete,
    hints_given,
    inputs_come_as_said,
    kept_values_stay,
)
# A logical graph whose layouts are chosen, besides.
LAYOUT_RULES: tuple[GraphRule, ...] = (layouts_given, updates_in_place)
# The rules of one rank's program, before it is cut into actors.
LOCAL_RULES: tuple[LocalRule, ...] = (
    local_values_assigned_once,
    local_values_made_before_use,
    local_calls_know_their_tensors,
    local_dtypes_known,
    local_keys_unique,
    exchanges_take_what_is_there,
    local_updates_write_variables,
    local_arguments_complete,
    loop_complete,
    forms_are_made,
)


def verify(graph: LogicalGraph, *, with_layouts: bool = False) -> LogicalGraph:
    """Return `graph` when it is legal. Rules found to hold for this very graph are not checked again.

    Args:
        with_layouts: also require a layout on every value, and equal layouts where the graph says
            so.

    Raises:
        InternalError: naming the rule and the node, since only a pass of weft can have made the
            graph.
    """
    for rule in GRAPH_RULES + (LAYOUT_RULES if with_layouts else ()):
        if rule in graph.held:
            continue
        for node, problem in rule(graph):
            line = node_text(node, graph.placements)
            raise _broken(f"graph {graph.name!r}", rule.__name__, problem, line)
        graph.held.add(rule)
    return graph


def verify_local(program: LocalProgram) -> LocalProgram:
    """Return `program` when it is legal. Rules found to hold for this very program are not checked again.

    Raises:
        InternalError: naming the rule and the line, since only a pass of weft can have made the
            program.
    """
    for rule in LOCAL_RULES:
        if rule in program.held:
            continue
        for line, problem in rule(program):
            raise _broken(f"program of rank {program.rank}", rule.__name__, problem, line)
        program.held.add(rule)
    return program


def _broken(what: str, rule: str, problem: str, line: str) -> InternalError:
    return InternalError(f"the {what} breaks the rule {rule}: {problem} in\n  {line}")
