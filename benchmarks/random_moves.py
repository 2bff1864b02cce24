"""Random moves of every kind over a candidate for a step, to check delta planning against full plans."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from weft.errors import UserError
from weft.ir.logical import Call
from weft.ops import signatures
from weft.planning.explorer import Explorer
from weft.planning.moves import (
    Credit,
    MicroBatches,
    Move,
    OtherStrategy,
    Recompute,
    SignatureChange,
    StageBorder,
)
from weft.planning.stored_step import StoredStep
from weft.strategy.parts import Stage, Zero

KINDS = ("signature", "border", "micro-batches", "credit", "recompute", "ZeRO")


def random_move(kind: str, random: Random, explorer: Explorer, step: StoredStep) -> Move | None:
    """A move of a kind; None where there is none, such as of borders without stages that are named."""
    strategy = explorer.candidate.strategy
    if kind == "signature":
        calls = [node for node in step.graph.of_kind(Call) if node.hint is None and node.makes]
        call = random.choice(calls)
        every = signatures(call.first, 2)
        return SignatureChange(call.makes[0].name, random.choice([None, *map(str, every)]))
    if kind == "micro-batches":
        return MicroBatches(random.choice((1, 2, 4)) * max(1, strategy.micro_batches // 4))
    if kind == "recompute":
        number = random.randrange(len(blocks(step)))
        return Recompute(blocks(step)[number], random.random() < 0.7)
    if kind == "credit":
        plan = random.choice(explorer.plans)
        register = random.choice(plan.registers)
        return Credit(
            plan.rank, register.value.name, max(1, register.credits + random.choice((-1, 1)))
        )
    if kind == "ZeRO":
        zero = random.choice((None, Zero(1), Zero(2), Zero(3)))
        return OtherStrategy(replace(strategy, zero=zero))
    return _border(random, strategy.stages)


def blocks(step: StoredStep) -> list[str]:
    """The repeated layers of a GPT."""
    return [path for path in step.modules if path.startswith("blocks.") and path.count(".") == 1]


def _border(random: Random, stages: tuple[Stage, ...] | int | object) -> Move | None:
    """The last layer of a stage goes to the next one, or its first one to the one before."""
    if not isinstance(stages, tuple) or len(stages) < 2:
        return None
    number = random.randrange(len(stages))
    other = random.choice([n for n in (number - 1, number + 1) if 0 <= n < len(stages)])
    own = sorted(
        (each for each in stages[number].patterns if each.startswith("blocks.")),
        key=lambda path: int(path.split(".")[1]),
    )
    if len(own) < 2:
        return None
    return StageBorder(own[0] if other < number else own[-1], other)


def applied(explorer: Explorer, move: Move) -> float | str:
    """Seconds after a move, or why it was refused."""
    try:
        return explorer.apply(move)
    except UserError as error:
        return str(error)
