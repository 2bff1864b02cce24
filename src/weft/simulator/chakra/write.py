"""Write the execution traces of a planned step: a file for each rank, and one with the communicators."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from weft.errors import UserError
from weft.hardware.costs import Costs
from weft.simulator.chakra.nodes import ChakraNodes, check_pieces, group_name
from weft.simulator.chakra.wire import trace_bytes
from weft.simulator.steps.acts import ActCosts
from weft.simulator.steps.planned import PlannedStep
from weft.simulator.timing.tasks import tasks_of

# More files than this are not written at once.
MOST_RANKS = 4096


def write_chakra(
    step: PlannedStep, acts: ActCosts, costs: Costs, folder: str | Path
) -> Sequence[Path]:
    """Write Chakra execution traces of one step, as ASTRA-sim reads them.

    `rank.<r>.et` has the nodes of rank `r`; the folder with "rank" is the prefix that ASTRA-sim takes.
    `comm_groups.json` has the ranks of each communicator. Calls have their seconds, in whole
    microseconds, their operations and their bytes; exchanges only their bytes.

    Args:
        step: what runs.
        acts: what its acts cost.
        costs: of the machine.
        folder: made where it is missing.

    Returns:
        The files.

    Raises:
        UserError: when there are too many ranks, a rank's exchanges are not known, or the files cannot be written.
    """
    if len(step.ranks) > MOST_RANKS:
        raise UserError(
            f"traces are files for each rank: expected at most {MOST_RANKS} ranks, found {len(step.ranks)}"
        )
    contents = _contents(step, acts, costs)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (Path(folder) / name).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"cannot write the traces to {folder}: {error.strerror}; give a folder that can be written"
        ) from error
    return [Path(folder) / name for name in contents]


def _contents(step: PlannedStep, acts: ActCosts, costs: Costs) -> dict[str, bytes]:
    """The files by name."""
    seconds = {plan.rank: acts.seconds(plan.rank) for plan in step.plans}
    making = ChakraNodes(step, tasks_of(step.plans, seconds), costs)
    plans = {plan.rank: plan for plan in step.plans}
    nodes = {
        rank: making.of(plans[first], rank)
        for first, members in step.members.items()
        if first in plans
        for rank in members
    }
    check_pieces(nodes)
    found = {f"rank.{rank}.et": trace_bytes(own) for rank, own in sorted(nodes.items())}
    groups = {str(group_name(one.id)): list(one.ranks) for one in step.communicators}
    return {**found, "comm_groups.json": json.dumps(groups).encode()}
