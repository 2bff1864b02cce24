"""Batches of which each process brings its own rows, as loaders with a `DistributedSampler` do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from weft.capture.batch import leaves_of, spread
from weft.capture.tree import flatten, unflatten
from weft.errors import UserError
from weft.layout import SBP, Broadcast, Placement, Split
from weft.patterns import matches
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs
from weft.tensor import GlobalTensor
from weft.tensor.create import of_parts

# The attribute of tensors that are leaves of a whole batch, the same in every process.
_WHOLE = "_weft_whole"


def mark_whole(batch: Any) -> None:
    """Note that a batch is whole, so that no program takes it for rows of this process."""
    for _, leaf in flatten(batch, "batch")[0]:
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _WHOLE, True)


@final
class LocalBatch:
    """Makes whole batches, as global tensors, of what each process brings.

    A leaf lies as the strategy says: where it is split, every process brings its part, all of the
    same size; what is Broadcast is the same on all. A process that has all ranks brings all.

    Args:
        strategy: names the layouts of the batch's leaves.
        placement: of all ranks; there are no stages.

    Raises:
        UserError: when the strategy has stages, or this process some of several ranks.
    """

    def __init__(self, strategy: Strategy, placement: Placement, world: World) -> None:
        self._patterns: Mapping[str, SBPs] = strategy.batch
        self._placement = placement
        self._whole = len(world.ranks) == world.size
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
        """The layout of a leaf, one SBP for each axis."""
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
            f'batch="local": the strategy does not say how the leaf {key!r} lies; name it in '
            f"Strategy(batch={{{key!r}: …}}), split along the axes whose ranks have rows of their own"
        )
