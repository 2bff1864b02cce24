"""Start one process for each rank with torchrun's elastic agent, and tell which ones failed.

The agent restarts nothing here: when one process fails, it ends the others at once. On one node it
opens no port: it has nobody to meet, and its ranks meet in a file (`weft.runtime.world.meeting`). Nodes
meet in torch's own store, which believes whoever reaches it: it unpickles what it finds there.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.runtime.world.meeting import MEETING

# The rendezvous of a node that is alone.
ALONE = "weft-alone"

# How often the agent looks at its processes, and how long a process that was told to end may take,
# in seconds.
MONITOR_SECONDS = 0.1
SHUTDOWN_SECONDS = 10


@final
@dataclass(frozen=True)
class Fleet:
    """The processes to start: how many, and how the nodes find each other.

    Attributes:
        ranks: processes on this node.
        nodes: nodes that take part; the same command is started on each.
        rendezvous: "host:port" on one of the nodes; not used for a single node.
        run_id: name of the run, the same on each node.
    """

    ranks: int
    nodes: int = 1
    rendezvous: str = ""
    run_id: str = ""


@final
@dataclass(frozen=True)
class Exit:
    """The end of one process: global rank, process id, exit code (negative: minus the signal)."""

    rank: int
    pid: int
    code: int


def launch(command: Sequence[str], fleet: Fleet, folder: Path) -> tuple[Exit, ...]:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment,
    and shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise. On one node
    nobody listens at MASTER_PORT; ranks that call `weft.runtime.world.meeting.meet_in_file` meet there.

    Args:
        command: program and arguments.
        fleet: how many.
        folder: for files of this run; nobody else can reach it.

    Returns:
        the processes that failed on their own; empty when all ended well.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    _prepare_environment(fleet.ranks)
    if fleet.nodes == 1:
        _keep_inside(folder)
    agent = elastic_launch(_config(fleet, folder), command[0])
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


def _keep_inside(folder: Path) -> None:
    """Have the ranks meet in a file, and talk over the loopback interface where they use sockets."""
    os.environ[MEETING] = str(folder / "meeting")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # this name, not all that begin so


@final
class _Alone(RendezvousHandler):
    """The rendezvous of the only node: its store is in the memory of this process."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return ALONE

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        place = RendezvousStoreInfo.build(0, store, "127.0.0.1")
        return RendezvousInfo(store, 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _alone(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Alone(parameters.run_id)


rendezvous_handler_registry.register(ALONE, _alone)


def _config(fleet: Fleet, folder: Path) -> LaunchConfig:
    alone = fleet.nodes == 1
    return LaunchConfig(
        min_nodes=fleet.nodes,
        max_nodes=fleet.nodes,
        nproc_per_node=fleet.ranks,
        run_id=fleet.run_id or str(uuid.uuid4()),
        rdzv_backend=ALONE if alone else "c10d",
        rdzv_endpoint="" if alone else fleet.rendezvous,
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
    )
