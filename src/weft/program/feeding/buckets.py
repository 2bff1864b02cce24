"""Buckets: batches of many lengths are padded to a few, so that the step is planned for each of these only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch

from weft.capture.tree import flatten, unflatten
from weft.errors import BatchError, UserError, shown
from weft.patterns import first_match
from weft.strategy.parts import hold


@final
@dataclass(frozen=True)
class Buckets:
    """Lengths that a dimension of batches is padded to, at its end.

    The result is that of the plain program only where the loss does not look at what is padded, as
    with an attention mask of 0 and labels of -100.

    Attributes:
        sizes: the lengths, rising.
        values: by pattern of the names of leaves, what each is padded with; other leaves stay as
            they are.
        dim: of these leaves.

    Raises:
        UserError: when sizes are no rising lengths, or there are no values.
    """

    sizes: tuple[int, ...]
    values: Mapping[str, float]
    dim: int

    def __init__(self, sizes: Iterable[int], values: Mapping[str, float], dim: int = 1) -> None:
        lengths = tuple(sizes) if isinstance(sizes, Iterable) else ()
        whole = all(type(size) is int and size > 0 for size in lengths)
        if not lengths or not whole or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f"weft.Buckets(sizes=…) takes rising lengths such as (128, 256), found {shown(sizes)}"
            )
        if (
            not isinstance(values, Mapping)
            or not values
            or not all(map(_is_padding, values.items()))
        ):
            raise UserError(
                'weft.Buckets(values=…) takes what to pad each leaf with, such as {"input_ids": 0, "labels": -100}, '
                f"found {shown(values)}"
            )
        if type(dim) is not int:
            raise UserError(f"weft.Buckets(dim=…) takes a dimension, such as 1, found {shown(dim)}")
        hold(self, sizes=lengths, values=dict(values), dim=dim)

    def padded(self, batch: Any, at_least: Mapping[str, int] = MappingProxyType({})) -> Any:
        """The batch with each of its named leaves padded to the next length.

        Args:
            batch: any nest.
            at_least: by name of a leaf, the length that it is padded to where it is shorter.

        Raises:
            BatchError: when one is longer than all lengths, or no leaf is named.
        """
        sizes = self.sizes_of(batch)
        found, tree = flatten(batch, "batch")
        leaves = [
            self._leaf(leaf, self._value(key), max(sizes[key], at_least.get(key, 0)))
            if key in sizes
            else leaf
            for key, leaf in found
        ]
        return unflatten(leaves, tree)

    def sizes_of(self, batch: Any) -> dict[str, int]:
        """The length that each named leaf is padded to; raises as `padded`."""
        found, _ = flatten(batch, "batch")
        tensors = {key: leaf for key, leaf in found if isinstance(leaf, torch.Tensor)}
        sizes = {
            key: self._size(key, leaf)
            for key, leaf in tensors.items()
            if self._value(key) is not None
        }
        if not sizes:
            raise BatchError(
                f"weft.Buckets names the leaves {', '.join(self.values)}, the batch has {', '.join(tensors)}; "
                "name one of these"
            )
        return sizes

    def _value(self, key: str) -> float | None:
        chosen = first_match(self.values, key)
        return None if chosen is None else self.values[chosen]

    def _size(self, key: str, leaf: torch.Tensor) -> int:
        if not -leaf.dim() <= self.dim < leaf.dim():
            raise BatchError(
                f"batch leaf {key} has shape {list(leaf.shape)}, and no dimension {self.dim} to be padded; "
                "give weft.Buckets a dim= that it has, or name other leaves in values="
            )
        length = leaf.shape[self.dim]
        size = next((size for size in self.sizes if size >= length), None)
        if size is None:
            raise BatchError(
                f"batch leaf {key} has length {length}, the longest of weft.Buckets is {self.sizes[-1]}; cut it, or "
                "give a longer one"
            )
        return size

    def _leaf(self, leaf: torch.Tensor, value: Any, size: int) -> torch.Tensor:
        dim = self.dim % leaf.dim()
        ends = (0, 0) * (leaf.dim() - 1 - dim) + (0, size - leaf.shape[dim])
        return torch.nn.functional.pad(leaf, ends, value=value)


def _is_padding(entry: tuple[object, object]) -> bool:
    """True for the pattern of a leaf with a number."""
    return isinstance(entry[0], str) and isinstance(entry[1], int | float)
