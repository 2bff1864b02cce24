"""The command `weft`. The work of each command is imported when it runs: some need torch, others run without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import looked_up

if TYPE_CHECKING:
    from weft.cli.capture import capture_job as capture_job
    from weft.cli.capture import export_checkpoint as export_checkpoint
    from weft.cli.capture import import_files as import_files
    from weft.cli.look import check_this_machine as check_this_machine
    from weft.cli.look import list_ops as list_ops
    from weft.cli.look import show_op as show_op
    from weft.cli.measure import measure_here as measure_here
    from weft.cli.plans import PlanOptions as PlanOptions
    from weft.cli.plans import SimulationFiles as SimulationFiles
    from weft.cli.plans import diff_strategies as diff_strategies
    from weft.cli.plans import join_reports as join_reports
    from weft.cli.plans import plan_graph as plan_graph
    from weft.cli.plans import simulate_graph as simulate_graph
    from weft.cli.run import RunOptions as RunOptions
    from weft.cli.run import run_script as run_script
    from weft.cli.search import SearchOptions as SearchOptions
    from weft.cli.search import search_graph as search_graph
    from weft.runtime.world.launchers import Nodes as Nodes

_NAMES = {
    "weft.cli.capture": "capture_job export_checkpoint import_files",
    "weft.cli.look": "list_ops check_this_machine show_op",
    "weft.cli.measure": "measure_here",
    "weft.cli.plans": "PlanOptions SimulationFiles diff_strategies join_reports plan_graph simulate_graph",
    "weft.cli.run": "RunOptions run_script",
    "weft.cli.search": "SearchOptions search_graph",
    "weft.runtime.world.launchers": "Nodes",
}

if not TYPE_CHECKING:
    __getattr__ = looked_up(
        __name__, {name: home for home, names in _NAMES.items() for name in names.split()}
    )
