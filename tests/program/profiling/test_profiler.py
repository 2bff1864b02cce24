"""A program's figures, measured by its ranks side by side: every call, update and exchange that it makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import weft
from models import GPT, token_loss
from weft.hardware import default_device
from weft.hardware.durations import Durations, joined_size, makers_of
from weft.hardware.measured_costs import MeasuredCosts, from_json, to_json
from weft.ir.plan import Communicate, LocalCall, LocalUpdate
from weft.program.profiling import profiler
from weft.program.profiling.profiler import (
    Overheads,
    Patience,
    filling_program,
    measured_costs,
    middle,
    step_overhead,
)
from weft.runtime.profiling import call_times, exchange_times
from weft.units import Bytes, Seconds


def test_nothing_of_a_program_is_left_to_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few and small: what is measured counts here, not how long it takes.
    monkeypatch.setattr(exchange_times, "SIZES", exchange_times.SIZES[:2])
    monkeypatch.setattr(exchange_times, "_TIMES", 2)
    monkeypatch.setattr(profiler, "_FIRST", 1)
    monkeypatch.setattr(profiler, "_STEPS", 3)
    monkeypatch.setattr(call_times, "_ELEMENTS", call_times._ELEMENTS[:2])
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(16, (4, 8))
    told: list[str] = []
    with weft.local_world(2) as world:
        program = weft.compile(
            model,
            token_loss,
            optimizer,
            {"x": tokens, "y": tokens},
            placement=weft.placement("cpu", [0, 1]),
        )
        compiled = program._core.compiled
        quick = Patience(call=0.0, update=0.0)
        found = measured_costs(world, [compiled], program._core.step.optimizers, quick, told.append)
        program.close()
    assert from_json(to_json(found), "file") == found
    assert (found.machine["ranks"], found.machine["processes"]) == (2, 2 // len(world.ranks))
    assert ("all_reduce of 2" in told) == (0 in world.ranks)
    assert "transfer of 2" in found.exchanges
    # Beyond the usual sizes, what the program sends at once.
    actors = [actor for plan in compiled.plan.ranks for actor in plan.actors]
    sent = [joined_size(each.collectives) for each in actors if isinstance(each, Communicate)]
    assert max(points[-1].bytes for points in found.exchanges.values()) == max(sent)
    # A step of a program takes its frame; more than no time, less than a second.
    assert 0 < found.step < 1
    assert 0 <= found.act < 1
    assert min(found.slowdown) >= 1
    assert found.memory is not None
    assert found.memory > 2**20
    durations = Durations(MeasuredCosts(found, default_device("cpu")), compiled.plan.communicators)
    for each in compiled.programs:
        nodes = [n for n in each.nodes if isinstance(n, LocalCall | LocalUpdate)]
        guessed = {
            durations.cost(n, each.values, each.rank, makers_of(each.nodes)).estimate for n in nodes
        }
        assert guessed == {""}


class OneOfTwo(NamedTuple):
    """A world of which this process has the first rank, while the other one tells its text."""

    other: str
    ranks: tuple[int, ...] = (0,)

    def gather(self, texts: dict[int, str]) -> list[str]:
        return [texts[0], self.other]


@pytest.mark.parametrize("other", ["5", "60000000"])
def test_stages_that_hold_less_fill_as_much_as_those_that_hold_most(other: str) -> None:
    """Each knows its own plans; a program that all of them compile has one size."""
    peak = SimpleNamespace(memory=SimpleNamespace(peak=50_000_000))
    compiled = SimpleNamespace(peaks=(peak,))
    found = profiler._held(OneOfTwo(other), [compiled])  # type: ignore[arg-type, list-item]
    assert found == max(50_000_000, int(other))


class Act(NamedTuple):
    actor: int


def test_overheads_are_medians_and_not_below_zero() -> None:
    seen = [Overheads(1.0, -3.0, 2.0), Overheads(3.0, -1.0, 2.0), Overheads(2.0, -2.0, 9.0)]
    assert middle(seen) == Overheads(2.0, 0.0, 2.0)


def test_what_a_step_takes_beyond_its_calls() -> None:
    """Acts 0 and 0 again in a loop, then an exchange: from begin to end of these, and around them."""
    calls = {0: Seconds(2.0), 1: Seconds(3.0)}
    acts = [(0, 0, 2), (0, 3, 5), (1, 6, 10)]
    spans = [(Act(actor), begin * 10**9, end * 10**9) for actor, begin, end in acts]
    found = profiler._of_step(spans, calls, {0}, 11.5)  # type: ignore[arg-type]
    # From act to act 3 s, of which calls take 2; the calls of all are 7 s, overheads of two acts 2, of 10 s.
    assert found == Overheads(Seconds(0.5), Seconds(10 - 7 - 2 * 0.5), Seconds(1.5))


def test_the_frame_of_a_step_that_fills_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank reads as many bytes as a step holds; what is between steps takes time."""
    monkeypatch.setattr(profiler, "_FIRST", 1)
    monkeypatch.setattr(profiler, "_STEPS", 3)
    with weft.local_world(2) as world:
        program, batch = filling_program(world, Bytes(4096))
        read = [
            node.value.shape for node in program._core.variants.current.compiled.programs[0].inputs
        ]
        assert 0 < step_overhead(program, batch) < 1
        program.close()
    assert any(4 * size >= 4096 for shape in read for size in shape[:1])
