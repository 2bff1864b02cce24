"""Tensors that stay, moved out of the midst of those that a step gives back.

An optimizer makes its states in its first step, while gradients and activations are alive. They get memory between
these, stay there, and cut what is given back into holes: glibc finds room for the large tensors of later steps in few
of them, and takes fresh memory instead. So what was made to stay moves to one place before the next step. A tensor that
moves is the same object with the same storage; only the memory of the storage is another one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from weft.runtime.memory.allocator import give_back, keep_freed_memory

# Bytes below which a tensor stays where it is, and below which all of them do: holes as small do not matter.
_LEAST, _WORTH = 2**12, 2**20


def lay_together(tensors: Iterable[Tensor], room: int) -> int:
    """Move tensors on the CPU to one place of the heap, and give what is free then to the system.

    Nothing moves where the process's allocator is not weft's to set up. Call it between steps: nobody may read or
    write the tensors meanwhile, or hold a pointer into their memory that is not torch's.

    Args:
        tensors: of any dtypes and shapes. Views, and tensors in memory that is not of torch's allocator, stay.
        room: bytes that copies may take for a moment; where they would take more, the tensors move in portions.

    Returns:
        Bytes that were moved: 0 where all together are less than a mebibyte; without tensors larger than the room.
    """
    every = (each.untyped_storage() for each in tensors if _moves(each))
    found = {each.data_ptr(): each for each in every}
    if sum(each.nbytes() for each in found.values()) < _WORTH or not keep_freed_memory():
        return 0
    # Where all do not fit, those that lie highest go first, into what is free below them.
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
    """Give storages memory anew, the one with the lowest address first; their bytes, 0 where copies find no room."""
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
    """A copy in memory of its own from the system."""
    memory = mmap.mmap(-1, storage.nbytes())
    copy = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy
