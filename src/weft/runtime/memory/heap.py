"""The heap of a process on a CPU: memory that a step frees is kept for the next step, and long-lived tensors are
together.

By default glibc takes large tensors from the system one by one and gives them back when they are
freed, and each thread has an arena of its own: a step then touches thousands of fresh pages, which
the kernel has to map and clear. A step needs the same memory again and again, so keeping what was
used most costs nothing: the peak is the same.

An optimizer makes its states in its first step, while gradients and activations are alive. They get memory between
these, stay there, and cut what is given back into holes: glibc finds room for the large tensors of later steps in few
of them, and takes fresh memory instead. So the states are moved together before the next step. A tensor that
moves is the same object with the same storage; only the storage's memory changes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, UntypedStorage

from weft.errors import wrong

# "kept" (the default), or "system" to leave the allocator as it is.
VARIABLE = "WEFT_MALLOC"
_CHOICES = ("kept", "system")
# Parameters of mallopt(3): never give back the top of the heap; take all below 1 GiB from the heap;
# one heap for all threads, so that what one frees serves the others.
_SETTINGS = ((-1, -1), (-3, 2**30), (-8, 1))
# Bytes below which a tensor stays where it is, and below which all of them do: holes as small do not matter.
_LEAST, _WORTH = 2**12, 2**20


def is_free_to_choose(environment: Mapping[str, str]) -> bool:
    """True if the user has not set glibc's allocator up, or told weft to leave it alone.

    Raises:
        UserError: the variable holds something else.
    """
    found = environment.get(VARIABLE) or _CHOICES[0]
    if found not in _CHOICES:
        raise wrong(VARIABLE, " or ".join(_CHOICES), found)
    own = any(name.startswith("MALLOC_") for name in environment)
    tuned = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return not own and not tuned and found != "system"


@cache
def keep_freed_memory() -> bool:
    """Have the process keep what it frees; False with another C library, or where the user chose otherwise."""
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    done = [mallopt(name, value) for name, value in _SETTINGS]
    return all(done)


def give_back() -> None:
    """Give what is free now to the system: what stays is what a program that was just made holds.

    Nothing happens with another C library, and where the user chose otherwise.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None if there is none, or it is not weft's to set up."""
    if sys.platform != "linux" or not is_free_to_choose(os.environ):
        return None
    return getattr(ctypes.CDLL(None), name, None)


def defragment(tensors: Iterable[Tensor], room: int) -> int:
    """Move tensors on the CPU to one place of the heap, and give what is free then to the system.

    Nothing moves where the process's allocator is not weft's to set up. Call it between steps: nobody may read or
    write the tensors meanwhile, or hold a pointer into their memory that is not torch's.

    Args:
        tensors: of any dtypes and shapes. Views, and tensors in memory that is not of torch's allocator, stay.
        room: bytes that copies may take for a moment; where they would take more, the tensors move in portions.

    Returns:
        Bytes that were moved: 0 if all together are less than a mebibyte; without tensors larger than the room.
    """
    every = (each.untyped_storage() for each in tensors if _moves(each))
    found = {each.data_ptr(): each for each in every}
    if sum(each.nbytes() for each in found.values()) < _WORTH or not keep_freed_memory():
        return 0
    # If all do not fit, those that lie highest go first, into what is free below them.
    ordered = [found[address] for address in sorted(found, reverse=True)]
    moved = sum(_move(portion) for portion in _portions(ordered, room))
    if moved:
        give_back()
    return moved


def _moves(tensor: Tensor) -> bool:
    """True for a tensor that has memory of its own, from torch's allocator of the CPU."""
    if tensor.device.type != "cpu" or tensor.nbytes < _LEAST:
        return False
    storage = tensor.untyped_storage()
    own = storage.nbytes() == tensor.nbytes
    return own and storage.resizable() and not storage.is_shared() and not tensor.is_pinned()


def _portions(ordered: Sequence[UntypedStorage], room: int) -> Iterator[list[UntypedStorage]]:
    """Neighbours that fit into the room together; one that does not fit alone is left out."""
    portion: list[UntypedStorage] = []
    taken = 0
    for storage in ordered:
        size = storage.nbytes()
        if size > room:
            continue
        if taken + size > room:
            yield portion
            portion, taken = [], 0
        portion.append(storage)
        taken += size
    if portion:
        yield portion


def _move(portion: Sequence[UntypedStorage]) -> int:
    """Give storages memory again, the one with the lowest address first; their bytes, 0 if copies find no room."""
    try:  # outside of the heap, which must not grow by them
        copies = [_outside(storage) for storage in portion]
    except OSError:
        return 0
    for storage in portion:
        storage.resize_(0)
    for storage, copy in zip(reversed(portion), reversed(copies), strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)
    return sum(copy.nbytes() for copy in copies)


def _outside(storage: UntypedStorage) -> UntypedStorage:
    memory = mmap.mmap(-1, storage.nbytes())
    copy = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy
