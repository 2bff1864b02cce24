"""Delta planning: equal to full plans and simulations, to the bit; undone exactly; never below its bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch

import weft
from benchmarks.random_moves import KINDS, applied, random_move
from models import GPT, token_batch, token_loss
from weft.errors import StrategyError, UserError
from weft.planning.explorer import Explorer
from weft.planning.moves import (
    Credit,
    MicroBatches,
    Move,
    OtherStrategy,
    Recompute,
    SignatureChange,
)
from weft.planning.stored_step import StoredStep
from weft.strategy.strategy import Strategy, data_parallel

FIRST = weft.Stage(["tokens", "positions", "blocks.0", "blocks.1"], weft.placement("cuda", [0, 1]))
LAST = weft.Stage(["blocks.2", "norm", "head"], weft.placement("cuda", [2, 3]))
STAGED = replace(data_parallel(), stages=(FIRST, LAST), micro_batches=2)


@cache
def stored() -> StoredStep:
    torch.manual_seed(0)
    model = GPT(layers=3)
    job = weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), token_batch(n=8))
    return job.stored()


def explorer(strategy: Strategy) -> Explorer:
    return Explorer(stored(), strategy, "h100x4")


def assert_like_full(found: Explorer) -> None:
    """What is known of a candidate is what a full plan and a full simulation give."""
    full = Explorer(stored(), found.candidate, "h100x4", kept=0)
    assert found.plans == full.plans
    assert found.simulation == full.simulation
    assert found.simulation.traces == full.simulation.traces
    assert found.seconds == full.seconds


@pytest.mark.parametrize("kind", KINDS)
def test_moves_of_each_kind_give_what_a_full_simulation_gives(kind: str) -> None:
    random, found = Random(KINDS.index(kind)), explorer(STAGED)
    done = 0
    while done < 2:
        move = random_move(kind, random, found, stored())
        if move is not None and isinstance(applied(found, move), float):
            done += 1
    assert_like_full(found)


def test_undo_gives_back_what_was() -> None:
    found = explorer(STAGED)
    register = next(r.value.name for r in found.plans[0].registers if r.rate > 1)
    moves: list[Move] = [Recompute("blocks.0"), Credit(0, register, 3), MicroBatches(4)]
    before = []
    for move in moves:
        before.append((found.candidate, found.seconds, found.plans, found.simulation))
        found.apply(move)
    for candidate, seconds, plans, simulation in reversed(before):
        assert found.undo() == seconds
        assert (found.candidate, found.plans, found.simulation) == (candidate, plans, simulation)
    with pytest.raises(StrategyError, match="no move to undo"):
        found.undo()


def test_bounds_are_never_above_the_answer() -> None:
    found = explorer(STAGED)
    for move in (Recompute("blocks.0"), MicroBatches(4), OtherStrategy(data_parallel())):
        before = found.candidate
        least, busiest = found.lower_bound(move), found.lower_bound(move, planned=True)
        assert found.candidate == before
        seconds = found.apply(move)
        assert 0 < least <= seconds
        assert 0 < busiest <= seconds


def test_other_stages_run_on_other_ranks() -> None:
    """A grid holds for the stages that it was given with."""
    found = Explorer(stored(), data_parallel(), "h100x4", grid=(2,))
    assert found.simulation.devices == 2
    staged = replace(data_parallel(), stages=2, micro_batches=2)
    found.apply(OtherStrategy(staged))
    assert_like_full(found)
    assert found.simulation.devices == 4
    found.undo()
    assert found.simulation.devices == 2


def test_a_signature_is_that_of_its_op_and_no_other() -> None:
    found = explorer(data_parallel())
    whole = found.simulation.sent_bytes
    found.apply(SignatureChange("mm", "B, B -> B"))
    assert found.simulation.sent_bytes > whole
    assert_like_full(found)


def test_moves_that_are_refused_change_nothing() -> None:
    found = explorer(STAGED)
    before = found.candidate, found.seconds
    for move in (
        SignatureChange("nothing", "B -> B"),
        SignatureChange("mm", "S(1), B -> B"),
        Credit(0, "nothing", 2),
        MicroBatches(3),
    ):
        with pytest.raises(UserError, match="use|give|take"):
            found.apply(move)
        assert (found.candidate, found.seconds) == before
