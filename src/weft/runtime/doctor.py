"""A look over what weft needs of this machine: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias, final

import torch
import torch.distributed as dist

from weft.errors import UserError
from weft.hardware.here import cores, kept_here
from weft.runtime.compiled.cache import cache_folder
from weft.runtime.compiled.inductor import missing_compiler
from weft.runtime.memory.allocator import is_free_to_choose
from weft.runtime.world.variables import timeout_seconds
from weft.units import bytes_text
from weft.version import __version__

State: TypeAlias = Literal["ok", "note", "bad"]
# The oldest that weft runs on.
PYTHON, TORCH = (3, 10), (2, 11)
# Bytes of shared memory, and open files, below which ranks of one host may run out.
SHARED, FILES = 1 << 28, 1024
_SHM = Path("/dev/shm")
# Packages that some things need, and which.
OPTIONAL = {
    "transformers": "its models",
    "tensorboard": "weft.logs.TensorBoard",
    "wandb": "weft.logs.WeightsAndBiases",
}


@final
@dataclass(frozen=True)
class Checkup:
    """One thing that was looked at.

    Attributes:
        about: it.
        found: what is here.
        state: "bad" where weft cannot run, "note" where something will be slower or is not there.
        advice: what to do; "" where nothing is.
    """

    about: str
    found: str
    state: State = "ok"
    advice: str = ""


def look_over() -> list[Checkup]:
    """Look at versions, devices, transports, compiler, folders and limits. It starts nothing and changes nothing."""
    looks: tuple[Callable[[], Iterator[Checkup]], ...] = (
        *(
            _versions,
            _devices,
            _transports,
            _compiler,
            _cache,
            _limits,
            _variables,
            _costs,
            _packages,
        ),
    )
    return [check for look in looks for check in look()]


def _versions() -> Iterator[Checkup]:
    yield Checkup(
        "weft", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    if sys.version_info < PYTHON:
        advice = f"install Python {'.'.join(map(str, PYTHON))} or later"
        yield Checkup("Python", platform.python_version(), "bad", advice)
    numbers = tuple(int(each) for each in torch.__version__.split("+")[0].split(".")[:2])
    late = numbers >= TORCH
    advice = "" if late else f"install torch {'.'.join(map(str, TORCH))} or later"
    yield Checkup("torch", torch.__version__, "ok" if late else "bad", advice)


def _devices() -> Iterator[Checkup]:
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Checkup("CPU", f"{cores()} cores, OMP_NUM_THREADS {threads}")
    if not torch.cuda.is_available():
        yield Checkup("CUDA", "no devices; ranks run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Checkup(f"CUDA {index}", f"{facts.name}, {bytes_text(facts.total_memory)}")


def _transports() -> Iterator[Checkup]:
    if not dist.is_available() or not dist.is_gloo_available():
        advice = "install a torch with torch.distributed and Gloo"
        yield Checkup("Gloo", "not there: ranks as processes cannot run", "bad", advice)
    else:
        yield Checkup("Gloo", "there, for CPUs")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield Checkup("NCCL", "not there", "bad", "install a torch with NCCL for CUDA devices")
    if not _SHM.is_dir():
        yield Checkup("shared memory", "no /dev/shm: ranks of one host talk over Gloo", "note")
        return
    free = shutil.disk_usage(_SHM).free
    advice = "" if free >= SHARED else "make /dev/shm larger (docker run --shm-size=1g)"
    yield Checkup("shared memory", f"{bytes_text(free)} free in {_SHM}", _note(advice), advice)


def _compiler() -> Iterator[Checkup]:
    missing = missing_compiler("cuda" if torch.cuda.is_available() else "cpu")
    if missing is None:
        yield Checkup("compiler", 'there, for kernels="inductor" and "auto"')
    else:
        yield Checkup("compiler", 'none: kernels="aten" runs, "inductor" does not', "note", missing)


def _cache() -> Iterator[Checkup]:
    try:
        folder = cache_folder("kernels").parent
    except UserError as error:
        yield Checkup("cache", "cannot be used", "bad", str(error))
        return
    free = shutil.disk_usage(folder).free
    yield Checkup("cache", f"{folder}, nobody else may write there, {bytes_text(free)} free")


def _limits() -> Iterator[Checkup]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if files >= FILES else f"ulimit -n {4 * FILES}"
    yield Checkup("open files", f"{files} at most", _note(advice), advice)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Checkup("memory", bytes_text(memory))


def _variables() -> Iterator[Checkup]:
    own = sorted(name for name in os.environ if name.startswith("WEFT_") and name != "WEFT_SECRET")
    shown = ", ".join(f"{name}={os.environ[name]}" for name in own) or "none is set"
    try:
        is_free_to_choose(os.environ)
        timeout_seconds()
    except UserError as error:
        yield Checkup("variables", shown, "bad", str(error))
        return
    yield Checkup("variables", shown)


def _costs() -> Iterator[Checkup]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = kept_here(device)
    except UserError as error:
        yield Checkup("measured costs", "cannot be read", "bad", str(error))
        return
    if found:
        yield Checkup("measured costs", f"of this machine, {len(found)} files")
    else:
        advice = "weft measure, so that predictions and searches know this machine"
        yield Checkup("measured costs", "none of this machine", "note", advice)


def _packages() -> Iterator[Checkup]:
    for name, wants in OPTIONAL.items():
        if find_spec(name) is None:
            yield Checkup(name, f"not installed; {wants} would need it")
            continue
        try:
            yield Checkup(name, version(name))
        except PackageNotFoundError:
            yield Checkup(name, "there")


def _note(advice: str) -> State:
    return "note" if advice else "ok"
