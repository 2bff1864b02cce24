"""Batches made whole before a program takes them: padded to a few lengths, and of the rows that processes bring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch

from weft.capture.batch import leaves_of, spread
from weft.capture.tree import flatten, unflatten
from weft.errors import BatchError, UserError, wrong
from weft.layout import SBP, Broadcast, Placement, Split
from weft.patterns import first_match, matches
from weft.runtime.world.world import World
from weft.strategy.parts import hold
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs
from weft.tensor import GlobalTensor
from weft.tensor.create import of_parts


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
        UserError: when sizes are not rising lengths, or there are no values.
    """

    sizes: tuple[int, ...]
    values: Mapping[str, float]
    dim: int

    def __init__(self, sizes: Iterable[int], values: Mapping[str, float], dim: int = 1) -> None:
        lengths = tuple(sizes) if isinstance(sizes, Iterable) else ()
        whole = all(type(size) is int and size > 0 for size in lengths)
        if not lengths or not whole or list(lengths) != sorted(set(lengths)):
            raise wrong("weft.Buckets(sizes=…)", "rising lengths such as (128, 256)", sizes)
        given = values.items() if isinstance(values, Mapping) else ()
        numbers = all(isinstance(k, str) and isinstance(x, int | float) for k, x in given)
        if not given or not numbers:
            expected = 'what to pad each leaf with, such as {"input_ids": 0, "labels": -100}'
            raise wrong("weft.Buckets(values=…)", expected, values)
        if type(dim) is not int:
            raise wrong("weft.Buckets(dim=…)", "a dimension, such as 1", dim)
        hold(self, sizes=lengths, values=dict(values), dim=dim)

    def padded(self, batch: Any, at_least: Mapping[str, int] = MappingProxyType({})) -> Any:
        """The batch with each of its named leaves padded to the next length.

        Args:
            batch: any nest.
            at_least: by name of a leaf, the length that it is padded to where it is shorter.

        Raises:
            BatchError: when one is longer than all lengths, or no leaf is named.
        """
        found, tree = flatten(batch, "batch")
        sizes = self._sizes(found)
        leaves = []
        for key, leaf in found:
            pattern = first_match(self.values, key)
            if key in sizes and pattern is not None:
                dim, size = self.dim % leaf.dim(), max(sizes[key], at_least.get(key, 0))
                ends = (0, 0) * (leaf.dim() - 1 - dim) + (0, size - leaf.shape[dim])
                leaf = torch.nn.functional.pad(leaf, ends, value=self.values[pattern])
            leaves.append(leaf)
        return unflatten(leaves, tree)

    def sizes_of(self, batch: Any) -> dict[str, int]:
        """The length that each named leaf is padded to; raises as `padded`."""
        return self._sizes(flatten(batch, "batch")[0])

    def _sizes(self, found: Sequence[tuple[str, Any]]) -> dict[str, int]:
        tensors = {key: leaf for key, leaf in found if isinstance(leaf, torch.Tensor)}
        sizes: dict[str, int] = {}
        for key, leaf in tensors.items():
            if first_match(self.values, key) is None:
                continue
            if not -leaf.dim() <= self.dim < leaf.dim():
                raise BatchError(
                    f"batch leaf {key} has shape {list(leaf.shape)}, and no dimension {self.dim} to be padded; "
                    "give weft.Buckets a dim= that it has, or name other leaves in values="
                )
            length = leaf.shape[self.dim]
            if length > self.sizes[-1]:
                raise BatchError(
                    f"batch leaf {key} has length {length}, the longest of weft.Buckets is {self.sizes[-1]}; cut it, "
                    "or give a longer one"
                )
            sizes[key] = next(size for size in self.sizes if size >= length)
        if not sizes:
            raise BatchError(
                f"weft.Buckets names the leaves {', '.join(self.values)}, the batch has {', '.join(tensors)}; "
                "name one of these"
            )
        return sizes


# The attribute of tensors that are leaves of a whole batch, the same in every process.
_WHOLE = "_weft_whole"


def mark_batch_whole(batch: Any) -> None:
    """Note that a batch is whole, so that no program takes it for rows of this process."""
    for _, leaf in flatten(batch, "batch")[0]:
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _WHOLE, True)


@final
class LocalBatch:
    """Makes whole batches, as global tensors, of what each process brings.

    A leaf is laid out as the strategy says: where it is split, every process brings its part, all of the same size;
    what is Broadcast is the same on all. A process that has all ranks brings all. Raises UserError for a strategy with
    stages.
    """

    def __init__(self, strategy: Strategy, placement: Placement, world: World) -> None:
        self._patterns: Mapping[str, SBPs] = strategy.batch
        self._placement = placement
        self._whole = not world.several
        if strategy.stages and strategy.stages != 1:
            raise UserError(
                'batch="local" goes with strategies without stages: in a pipeline, not every rank has rows of its own. '
                "Give every process the whole batch"
            )

    def whole(self, batch: Any) -> Any:
        """The batch with a global tensor in place of each leaf that is split."""
        if self._whole:
            return batch
        found, tree = leaves_of(batch)
        made = [self._leaf(key, leaf) for key, leaf in found]
        pairs = ((x, y) for (_, x), y in zip(found, made, strict=True) if x is not y)
        rows = next(((x.shape[0], y.shape[0]) for x, y in pairs if x.shape[0] < y.shape[0]), (0, 0))
        return unflatten([spread(each, *rows) for each in made], tree)

    def _leaf(self, key: str, leaf: Any) -> Any:
        if getattr(leaf, _WHOLE, False):
            raise UserError(
                f'batch="local": the leaf {key!r} is of a whole batch, as a weft.Loader gives that was made without '
                "this program, which takes of each process its own rows; make weft.Loader(…, program), which gives "
                "each process its rows. A loader of this process's own data is a torch.utils.data.DataLoader"
            )
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, GlobalTensor) or not leaf.dim():
            return leaf
        sbp = self._sbp(key, leaf)
        if all(isinstance(each, Broadcast) for each in sbp):
            return leaf
        shape = list(leaf.shape)
        for each, parts in zip(sbp, self._placement.shape, strict=True):
            if isinstance(each, Split):
                shape[each.dim] *= parts
        return of_parts(leaf, self._placement, sbp, shape)

    def _sbp(self, key: str, leaf: torch.Tensor) -> tuple[SBP, ...]:
        axes = self._placement.axes
        for pattern, given in self._patterns.items():
            if matches(pattern, key):
                every = given if isinstance(given, tuple) else (given,) * axes
                if len(every) == axes:
                    return tuple(
                        Split(each.dim % leaf.dim()) if isinstance(each, Split) else each
                        for each in every
                    )
        raise UserError(
            f'batch="local": the strategy does not say how the leaf {key!r} is laid out; name it in '
            f"Strategy(batch={{{key!r}: …}}), split along the axes whose ranks have rows of their own"
        )
