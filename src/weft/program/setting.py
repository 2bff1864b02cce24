"""The setting that all programs of one model share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor, nn

from weft.compiler.context import Options
from weft.layout import Placement
from weft.program.agreement import gathered
from weft.program.data.feed import RowsOfBatch
from weft.program.data.whole_batch import Buckets, LocalBatch
from weft.runtime.compiled.choice import Kernels
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class ProgramSetting:
    """The setting that all programs of one model share.

    Attributes:
        options: what the training step was compiled with.
        variables: the variables of each rank of this process that is in the placement.
        buckets: pads batches.
        local: makes whole batches of what each process brings; None if each brings all.
    """

    model: nn.Module
    world: World
    placement: Placement
    options: Options
    variables: Mapping[int, Variables]
    seed: int
    strategy: Strategy = field(default_factory=Strategy)
    kernels: Kernels = "aten"
    local: LocalBatch | None = None
    buckets: Buckets | None = None

    def whole(self, batch: Any) -> Any:
        """A batch as the program takes it: padded, and whole where each process brings a part."""
        if isinstance(batch, RowsOfBatch):
            if self.buckets is None:
                return batch
            return replace(batch, batch=self.buckets.padded(batch.batch))  # of all rows
        if self.buckets is not None:
            buckets, sizes = self.buckets, dict[str, int]()
            if self.by_rows:  # all pad to what the longest rows need
                self.world.calls.enter("lengths of a batch")
                texts = gathered(self.world, "sizes", lambda: json.dumps(buckets.sizes_of(batch)))
                every = list(map(json.loads, texts))
                sizes = {key: max(each.get(key, 0) for each in every) for key in every[0]}
            batch = buckets.padded(batch, sizes)
        return batch if self.local is None else self.local.whole(batch)

    @property
    def by_rows(self) -> bool:
        """True if a plain batch is taken for rows that this process brings, of several."""
        return self.local is not None and self.world.several

    def run(self, function: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Call `function(rank)` on all ranks of this process that take part; the result of the first."""
        results = self.world.run(lambda rank: function(rank) if rank in self.variables else None)
        return next(result for result in results if result is not None)
