"""Start one process for each rank with torchrun's elastic agent, and tell which ones failed.

The agent restarts nothing here: when one process fails, it ends the others at once.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# How often the agent looks at its processes, and how long a process that was told to end may take,
# in seconds.
MONITOR_SECONDS = 0.1
SHUTDOWN_SECONDS = 10


@dataclass(frozen=True)
class Fleet:
    """How many processes to start and how the nodes find each other.

    Attributes:
        ranks: processes on this node.
        nodes: nodes that take part; the same command is started on each.
        rendezvous: "host:port" on one of the nodes; not needed for a single node.
        run_id: name of the run, the same on each node.
    """

    ranks: int
    nodes: int = 1
    rendezvous: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Exit:
    """How one process ended: global rank, process id, exit code (negative: minus the signal)."""

    rank: int
    pid: int
    code: int


def launch(command: Sequence[str], fleet: Fleet) -> tuple[Exit, ...]:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    and shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise.

    Returns:
        the processes that failed on their own; empty when all ended well.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    _prepare_environment(fleet.ranks)
    agent = elastic_launch(_config(fleet), command[0])
    try:
        agent(*command[1:])
    except ChildFailedError as error:
        failures = sorted(error.failures.items())
        return tuple(Exit(rank, failure.pid, failure.exitcode) for rank, failure in failures)
    except SignalException as error:
        raise KeyboardInterrupt from error
    return ()


def _prepare_environment(ranks: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    if "LOGLEVEL" not in os.environ:  # the agent's own words: weft tells what failed
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def _config(fleet: Fleet) -> LaunchConfig:
    alone = fleet.nodes == 1 and not fleet.rendezvous
    return LaunchConfig(
        min_nodes=fleet.nodes,
        max_nodes=fleet.nodes,
        nproc_per_node=fleet.ranks,
        run_id=fleet.run_id or str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if alone else fleet.rendezvous,
        local_addr="localhost" if alone else None,
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
    )
