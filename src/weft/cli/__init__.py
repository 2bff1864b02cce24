"""The command `weft`. The work of each command is imported when it runs: some need torch, others run without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import looked_up

if TYPE_CHECKING:
    from weft.cli.capture import capture_job as capture_job
    from weft.cli.convert import export_checkpoint as export_checkpoint
    from weft.cli.convert import import_files as import_files
    from weft.cli.diff import diff_strategies as diff_strategies
    from weft.cli.doctor import check_this_machine as check_this_machine
    from weft.cli.measure import measure_here as measure_here
    from weft.cli.ops import list_ops as list_ops
    from weft.cli.ops import show_op as show_op
    from weft.cli.planned import PlanOptions as PlanOptions
    from weft.cli.planned import plan_graph as plan_graph
    from weft.cli.report import join_reports as join_reports
    from weft.cli.run import RunOptions as RunOptions
    from weft.cli.run import run_script as run_script
    from weft.cli.search import SearchOptions as SearchOptions
    from weft.cli.search import search_graph as search_graph
    from weft.cli.simulate import SimulationFiles as SimulationFiles
    from weft.cli.simulate import simulate_graph as simulate_graph
    from weft.runtime.world.nodes.launchers import Nodes as Nodes

_HOMES = {
    "PlanOptions": "weft.cli.planned",
    "capture_job": "weft.cli.capture",
    "diff_strategies": "weft.cli.diff",
    "export_checkpoint": "weft.cli.convert",
    "import_files": "weft.cli.convert",
    "join_reports": "weft.cli.report",
    "list_ops": "weft.cli.ops",
    "check_this_machine": "weft.cli.doctor",
    "measure_here": "weft.cli.measure",
    "plan_graph": "weft.cli.planned",
    "run_script": "weft.cli.run",
    "Nodes": "weft.runtime.world.nodes.launchers",
    "RunOptions": "weft.cli.run",
    "show_op": "weft.cli.ops",
    "SearchOptions": "weft.cli.search",
    "search_graph": "weft.cli.search",
    "SimulationFiles": "weft.cli.simulate",
    "simulate_graph": "weft.cli.simulate",
}

if not TYPE_CHECKING:
    __getattr__ = looked_up(__name__, _HOMES)
