"""What passes between a rank's `step` and its actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Batches:
    """What passes between `step` and the actors: batches in, results out, by step and key.

    `held` says that the running step keeps its gradients for a later one and updates no parameter;
    `updated` says that it has updated parameters, or added gradients to those that are kept;
    `first` is how many steps other plans of the run have made before this one's step 0, for the random ops.
    """

    fed: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    fetched: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    held: bool = False
    updated: bool = False
    first: int = 0
