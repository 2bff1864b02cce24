"""Checksums of samples, by which processes notice that they do not have the same dataset.

Where each process loads its rows of a batch, no batch shows that the rows are of another order of the dataset than
those of the others. So all load a few samples alike, and compare them; of an iterable dataset, all that it gives.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from weft.capture.batch import is_dense
from weft.capture.tree import flatten
from weft.errors import UserError
from weft.program.checksums import array_checksum, batch_sums

# For each sample, or batch of them, the checksum of every leaf; None for what is another one each time it is loaded.
Sums: TypeAlias = "Mapping[str, dict[str, int | None] | None]"


def sums_of(samples: Any) -> dict[str, int | None]:
    """The checksum of every leaf."""
    return {key: _checksum(leaf) for key, leaf in flatten(samples, "it")[0]}


def sums_of_stable(load: Callable[[], Any]) -> dict[str, int | None] | None:
    """The checksums of a sample that is loaded twice; None of leaves that differ, as what an own generator draws.

    None for a sample that cannot be loaded: who needs it tells why.
    """
    try:
        one, other = sums_of(load()), sums_of(load())
    except Exception:
        return None
    return {key: each if other.get(key) == each else None for key, each in one.items()}


def check_same(every: list[str]) -> None:
    """Check that all processes have loaded the same samples.

    Args:
        every: what each rank says of its own, as JSON.

    Raises:
        UserError: naming the first sample that differs.
    """
    first, *others = map(json.loads, every)
    for rank, other in enumerate(others, 1):
        if first.keys() != other.keys():
            raise UserError(
                f"weft.Loader: the loaders of rank 0 and rank {rank} have other samples next, {', '.join(first)} and "
                f"{', '.join(other)}; give a loader the same seed, sampler, batch_size and place in all processes"
            )
        for name, leaf in _differing(first, other):
            raise UserError(
                f"weft.Loader: the dataset is not the same in all processes: {name} has another {leaf} on rank "
                f"{rank} than on rank 0. A loader takes the whole dataset in each process, and gives each its rows: do "
                "not split it by rank, list files in one order (sorted), shuffle and draw by one seed. Where each "
                'process has data of its own, give them by a torch.utils.data.DataLoader to a program of batch="local"'
            )


def _differing(one: Sums, other: Sums) -> Iterator[tuple[str, str]]:
    """The samples that have another leaf, and that leaf in words."""
    for name, a in one.items():
        b = other[name]
        if a is None or b is None:
            continue
        for key in {**a, **b}:
            left, right = a.get(key, 0), b.get(key, 0)
            if left != right and left is not None and right is not None:
                yield name, "content" if key == "it" else f"leaf {key!r}"


def _checksum(leaf: Any) -> int:
    """The checksum of a tensor, an array (images have one), a number or a text; of any other object, of its type."""
    if isinstance(leaf, Tensor) and is_dense(leaf) and leaf.device.type == "cpu":
        return batch_sums({"": leaf}, {}, 0).whole
    if hasattr(leaf, "__array_interface__"):
        values = np.asarray(leaf)
        if not values.dtype.hasobject:
            return array_checksum(values, 0, 0)
    text = type(leaf).__name__
    if leaf is None or isinstance(leaf, bool | int | float | complex):
        text = repr(leaf)
    elif isinstance(leaf, str | bytes):
        # The folder of a file may be another one on each host.
        text = str(leaf).rpartition("/")[2]
    return zlib.crc32(text.encode(errors="surrogatepass"))
