"""What all ranks must hold alike in a step, as checksums: the batch that each is given whole, hyperparameters."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.capture.optimizers import Optimizing, optimizers_of

# Elements of a leaf that are looked at in every step.
_SAMPLED = 64
# All of a leaf is looked at in the first steps, and then once in a while, when it is not larger.
_FIRST, _EVERY, _BYTES = 4, 16, 2**22


class BatchChecksum:
    """Checksums of the batches of one shape.

    Args:
        shapes: of the leaves, by key.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._places = {key: _places(shape) for key, shape in shapes.items()}

    def of(self, leaves: Mapping[str, Tensor], step: int) -> int:
        """The checksum of a batch, of a sample of each leaf in most steps; some microseconds a leaf.

        Tensors on other devices than the CPU are looked at in the first steps only, as the host
        would have to wait for them.
        """
        whole = step < _FIRST or step % _EVERY == 0
        found = 0
        for key, leaf in leaves.items():
            if leaf.device.type != "cpu" and step >= _FIRST:
                continue
            values = _values(leaf)
            if not (whole and leaf.nbytes <= _BYTES):
                values = values[self._places[key]]
            found = zlib.crc32(values.tobytes(), found)
        return found


class OptionsChecksum:
    """The checksum of the optimizers' hyperparameters; those that are tensors count by their kind.

    Args:
        optimizer: the user's, one or several; None in evaluation.
    """

    def __init__(self, optimizer: Optimizing) -> None:
        self._optimizers = optimizers_of(optimizer)
        self._known: tuple[list[Any], int] = ([], 0)

    def of(self, update: bool) -> int:
        """The checksum for a step."""
        groups = [group for one in self._optimizers.each for group in one.param_groups]
        now = [value for group in groups for name, value in group.items() if name != "params"]
        if not _equal(now, self._known[0]):
            text = ", ".join(map(_text, now))
            self._known = now, zlib.crc32(text.encode())
        return self._known[1] ^ update


def _equal(now: list[Any], before: list[Any]) -> bool:
    """Whether no value has changed; two tensors are not compared, but looked up again."""
    try:
        return now == before
    except RuntimeError:
        return False


def _text(value: Any) -> str:
    """A value, or its kind where its text would differ from process to process."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__


def _places(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Which elements of a leaf stand for all of it: as many of each dimension as the sample has room for."""
    room, found = _SAMPLED, []
    for size in shape:
        count = max(1, min(size, room))
        room = max(1, room // count)
        found.append(slice(None, None, max(1, size // count)))
    return tuple(found)


def _values(leaf: Tensor) -> Any:
    """A tensor as an array of numpy, which is quicker to cut; of other dtypes that it does not have, the bits."""
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
    try:
        return leaf.numpy()
    except TypeError:
        return leaf.view(torch.int16 if leaf.itemsize == 2 else torch.uint8).numpy()
