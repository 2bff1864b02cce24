"""A look over what weft needs of this machine: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf, isinf
from pathlib import Path
from typing import Literal, TypeAlias, final

import torch
import torch.distributed as dist

from weft.actors.invariants import VARIABLE as DEBUG
from weft.errors import UserError
from weft.hardware.measured_store import cores, stored_measurements
from weft.hardware.planning_costs import PLAN_COSTS, takes_measured
from weft.private import FOLDER
from weft.runtime.channels.shared_link import host
from weft.runtime.compiled.inductor import cache_folder, missing_compiler
from weft.runtime.devices.cuda_graphs import VARIABLE as CUDA_GRAPHS
from weft.runtime.devices.cuda_graphs import graph_mode
from weft.runtime.memory.heap import VARIABLE as MALLOC
from weft.runtime.memory.heap import is_free_to_choose
from weft.runtime.world.distributed import TRANSPORT, shares_memory
from weft.runtime.world.launch import (
    LAUNCHER,
    MEETING,
    RESTART,
    SECRET,
    STORE,
    TIMEOUT,
    given_secret,
    timeout_seconds,
)
from weft.units import bytes_text, counted
from weft.version import __version__

State: TypeAlias = Literal["ok", "note", "bad"]
# The oldest that weft runs on.
PYTHON, TORCH = (3, 10), (2, 11)
# Bytes of the memory file system, and open files, below which they may run out.
SHARED, FILES = 1 << 28, 1024
# A file system of Linux that is in memory.
MEMORY = Path("/dev/shm")
# Environment variables that weft reads, and ones that `weft run` sets for its ranks.
_VARIABLES = frozenset(
    {
        *(FOLDER, CUDA_GRAPHS, DEBUG, MALLOC, PLAN_COSTS, SECRET, TIMEOUT, TRANSPORT),
        *(LAUNCHER, MEETING, RESTART, STORE, "WEFT_FAILURE_NOTES", "WEFT_RANK_PROCESS"),
    }
)
# Packages that some things need, and which.
OPTIONAL = {"transformers": "its models"}


@final
@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        state: "bad" if weft cannot run, "note" if something will be slower or is not there.
        advice: what to do; "" if nothing is.
    """

    about: str
    found: str
    state: State = "ok"
    advice: str = ""


def check_machine() -> list[CheckResult]:
    """Look at versions, devices, transports, compiler, folders and limits. It starts nothing, and makes
    the folder of the cache alone, where there is none.
    """
    looks = (_versions, _devices, _transports, _compiler, _cache, _limits, _variables, _costs)
    return [check for look in (*looks, _packages) for check in look()]


def _versions() -> Iterator[CheckResult]:
    yield CheckResult(
        "weft", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    if sys.version_info < PYTHON:
        advice = f"install Python {'.'.join(map(str, PYTHON))} or later"
        yield CheckResult("Python", platform.python_version(), "bad", advice)
    numbers = tuple(int(each) for each in torch.__version__.split("+")[0].split(".")[:2])
    late = numbers >= TORCH
    advice = "" if late else f"install torch {'.'.join(map(str, TORCH))} or later"
    yield CheckResult("torch", torch.__version__, "ok" if late else "bad", advice)


def _devices() -> Iterator[CheckResult]:
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield CheckResult("CPU", f"{counted(cores(), 'core')}, OMP_NUM_THREADS {threads}")
    if not torch.cuda.is_available():
        yield CheckResult("CUDA", "no devices; ranks run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield CheckResult(f"CUDA {index}", f"{facts.name}, {bytes_text(facts.total_memory)}")


def _transports() -> Iterator[CheckResult]:
    if not dist.is_available() or not dist.is_gloo_available():
        advice = "install a torch with torch.distributed and Gloo"
        yield CheckResult("Gloo", "not there: ranks as processes cannot run", "bad", advice)
    else:
        yield CheckResult("Gloo", "there, for CPUs")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield CheckResult("NCCL", "not there", "bad", "install a torch with NCCL for CUDA devices")
    yield _shared_memory()
    yield _memory_files()


def _shared_memory() -> CheckResult:
    """The memory by which ranks of one host talk, which has no name and no place."""
    about = "shared memory"
    try:
        there = bool(host())
    except OSError as error:
        found = f"not there ({error.strerror or error}): ranks as processes cannot run so"
        return CheckResult(about, found, "bad", f"set {TRANSPORT}=gloo")
    if there:
        return CheckResult(about, "there, for ranks of one host")
    return CheckResult(about, "not on this system: ranks of one host talk over Gloo", "note")


def _memory_files() -> CheckResult:
    """The file system in memory, in which workers of loaders hand over what they load."""
    about, uses = str(MEMORY), "for workers of loaders"
    if not MEMORY.is_dir():
        return CheckResult(about, f"not there, {uses}", "note")
    if not os.access(MEMORY, os.W_OK):
        return CheckResult(
            about, f"cannot be written, {uses}", "note", f"chmod 1777 {MEMORY} (as root)"
        )
    free = shutil.disk_usage(MEMORY).free
    advice = "" if free >= SHARED else f"make {MEMORY} larger (docker run --shm-size=1g)"
    return CheckResult(about, f"{bytes_text(free)} free, {uses}", _note(advice), advice)


def _compiler() -> Iterator[CheckResult]:
    missing = missing_compiler("cuda" if torch.cuda.is_available() else "cpu")
    if missing is None:
        yield CheckResult("compiler", 'there, for kernels="inductor" and "auto"')
    else:
        yield CheckResult(
            "compiler", 'none: kernels="aten" runs, "inductor" does not', "note", missing
        )


def _cache() -> Iterator[CheckResult]:
    try:
        folder = cache_folder("kernels").parent
    except UserError as error:
        yield CheckResult("cache", "cannot be used", "bad", str(error))
        return
    free = shutil.disk_usage(folder).free
    yield CheckResult("cache", f"{folder}, nobody else may write there, {bytes_text(free)} free")


def _limits() -> Iterator[CheckResult]:
    files, most = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    advice = "" if files >= FILES else f"ulimit -n {min(4 * FILES, most):.0f}"
    if files < FILES and files == most:
        advice = f"have root raise the limit (docker run --ulimit nofile={4 * FILES})"
    found = "as many as wanted" if isinf(files) else f"{files:.0f} at most"
    yield CheckResult("open files", found, _note(advice), advice)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield CheckResult("memory", bytes_text(memory))


def _variables() -> Iterator[CheckResult]:
    own = sorted(name for name in os.environ if name.startswith("WEFT_") and name != SECRET)
    shown = ", ".join(f"{name}={os.environ[name]}" for name in own) or "none is set"
    try:
        for read in (is_free_to_choose, shares_memory, takes_measured):
            read(os.environ)
        for asked in (graph_mode, timeout_seconds, given_secret):
            asked()
    except UserError as error:
        yield CheckResult("variables", shown, "bad", str(error))
        return
    strange = ", ".join(name for name in own if name not in _VARIABLES)
    advice = f"weft reads no {strange}: docs/environment.md has all names" if strange else ""
    yield CheckResult("variables", shown, _note(advice), advice)


def _costs() -> Iterator[CheckResult]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = stored_measurements(device)
    except UserError as error:
        yield CheckResult("measured costs", "cannot be read", "bad", str(error))
        return
    if found:
        yield CheckResult("measured costs", f"of this machine, {counted(len(found), 'file')}")
    else:
        advice = "weft measure, so that predictions and searches know this machine"
        yield CheckResult("measured costs", "none of this machine", "note", advice)


def _packages() -> Iterator[CheckResult]:
    for name, wants in OPTIONAL.items():
        if find_spec(name) is None:
            yield CheckResult(name, f"not installed; {wants} would need it")
            continue
        try:
            yield CheckResult(name, version(name))
        except PackageNotFoundError:
            yield CheckResult(name, "there")


def _limit(number: int) -> float:
    return inf if number == resource.RLIM_INFINITY else number


def _note(advice: str) -> State:
    return "note" if advice else "ok"
