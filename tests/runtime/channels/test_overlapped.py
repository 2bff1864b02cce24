"""All-reduces in slices that overlap have the bits of the order of ranks, and keep their slices apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from on_ranks import passed
from weft.runtime.channels.channel import in_slices
from weft.runtime.channels.process import OverlappedReduction

SCRIPT = Path(__file__).with_name("reduces_over_gloo.py")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_over_gloo(size: int) -> None:
    outputs = passed(SCRIPT, size, WEFT_TRANSPORT="gloo")
    assert all("equal" in output for output in outputs)


class Alone:
    """A channel of two ranks whose peer sends what this one sends, as late as it may; notes what is on its way."""

    def __init__(self) -> None:
        self.index, self.size = 0, 2
        self.on_their_way: list[int] = []
        self.most = 0

    def count(self, sends: Sequence[Sequence[Tensor]]) -> None:
        pass

    def post(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], turn: int
    ) -> Callable[[], None]:
        assert turn not in self.on_their_way
        self.on_their_way.append(turn)
        self.most = max(self.most, len(self.on_their_way))
        # The peer has the same numbers: what it would send of this rank's part, and of its own when that is reduced.
        arrives = [x.clone() for x in sends[0]] if turn % 2 == 0 else [2 * x for x in receives[1]]

        def wait() -> None:
            self.on_their_way.remove(turn)
            for place, value in zip(receives[1], arrives, strict=True):
                place.copy_(value)

        return wait


@pytest.mark.parametrize("slices", [2, 3, 7])
def test_slices_overlap_and_stay_apart(slices: int) -> None:
    channel = Alone()
    tensors = [torch.arange(64.0 * slices), torch.arange(5.0)]
    expected = [2 * x for x in tensors]
    views = list(in_slices(tensors, 256))
    OverlappedReduction(cast(Any, channel), torch.device("cpu")).reduce(views, "sum")
    assert all(map(torch.equal, tensors, expected))
    assert channel.most == 2
    assert channel.on_their_way == []
