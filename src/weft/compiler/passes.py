"""The forms of a pass, and the runners of the tables of passes of `pipeline.py`.

A pass is one public function in a module of its own, pure, of one of two forms:

    GraphPass    (LogicalGraph, Context) -> LogicalGraph    an equal graph
    ProgramPass  (LocalProgram, Context) -> LocalProgram    an equal program of one rank

A pass that has nothing to do returns what it was given. All other input of a pass is in the `Context`, whose cache
returns the result of a pass for an equal graph and the same options. Facts that later passes need beyond the graph
come from an earlier `Decision`, which reads the graph and rewrites nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.compiler.context import Context
from weft.ir import LocalProgram, LogicalGraph, verify, verify_local

GraphPass: TypeAlias = Callable[[LogicalGraph, Context], LogicalGraph]
ProgramPass: TypeAlias = Callable[[LocalProgram, Context], LocalProgram]


@final
@dataclass(frozen=True)
class Decision:
    """A row among passes that settles something of the graph as it is by now, for passes after it."""

    decide: Callable[[LogicalGraph, Context], Context]


def run_on_graph(
    rows: Iterable[GraphPass | Decision],
    graph: LogicalGraph,
    context: Context,
    with_layouts: bool = False,
) -> tuple[LogicalGraph, Context]:
    """The graph after all passes, verified before the first and after each, and what was decided.

    Raises:
        InternalError: when a pass makes a graph that is not legal; the message names node and rule.
        UserError: what passes refuse.
    """
    graph = verify(graph, with_layouts=with_layouts)
    for row in rows:
        if isinstance(row, Decision):
            context = row.decide(graph, context)
        else:
            made = context.cache.of(row, graph, context)
            graph = verify(made, with_layouts=with_layouts)
    return graph, context


def run_on_programs(
    rows: Iterable[ProgramPass], programs: Iterable[LocalProgram], context: Context
) -> tuple[LocalProgram, ...]:
    """The programs of some ranks after all passes, verified before the first and after each; errors as above."""
    made = tuple(map(verify_local, programs))
    for row in rows:
        made = tuple(
            verify_local(context.cache.of(row, program, context, at=program.rank))
            for program in made
        )
    return made
