"""All ranks find the same links, and plans use them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.hardware import default_device, linked
from weft.ir.plan import Communicate, Communicator
from weft.runtime.world import distributed
from weft.runtime.world.distributed import measured_links
from weft.runtime.world.world import LocalWorld, local_world
from weft.units import Seconds

pytestmark = pytest.mark.timeout(30)
CPU = default_device("cpu")


@pytest.mark.parametrize("size", [2, 3])
def test_the_slowest_counts_everywhere(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 finds 1.1 ms of latency and 9 ms for a megabyte more; whatever is measured is less."""
    measure = distributed._exchange_seconds

    def seconds(channel: object, length: int) -> float:
        found = measure(channel, length)  # type: ignore[arg-type]
        return found if channel.rank != 1 else 1.1e-3 + (length - 1) * 9e-3 / 2**20  # type: ignore[attr-defined]

    monkeypatch.setattr(distributed, "_exchange_seconds", seconds)
    with local_world(size) as world:
        channels = world.connect((Communicator(0, tuple(range(size))),))
        found = world.run(lambda rank: measured_links(CPU, channels[rank][0]))
    assert found == [linked(CPU, 2**20 / 9e-3, Seconds(1.1e-3))] * size


def test_a_program_plans_with_the_links_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = linked(CPU, 1e7, Seconds(2e-5))

    def buckets() -> tuple[int, str]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with weft.local_world(2):
            program = weft.compile(
                model,
                lambda model, batch: model(batch).square().mean(),
                torch.optim.SGD(model.parameters()),
                torch.randn(8, 64),
                placement=weft.placement("cpu", [0, 1]),
            )
            actors = program.plan.ranks[0].actors
            return sum(isinstance(each, Communicate) for each in actors), program.explain(
                details=True
            )

    usual, text = buckets()
    monkeypatch.setattr(LocalWorld, "links", lambda _: slow)
    more, told = buckets()
    assert usual == 1 < more
    assert "links as measured: 0.1 Gbit/s, 0.02 ms" in told
    assert "links as measured" not in text
