"""Strategies that people write by hand, or that others published: what a search must not be worse than."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import final

import weft
from benchmarks.models import stored
from benchmarks.search.trial import Finding, searched, seconds_text
from weft.errors import InternalError, UserError
from weft.planning.stored_step import StoredStep

WHOLE, S = weft.broadcast, weft.split(0)
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


@final
@dataclass(frozen=True)
class Hand:
    """A strategy by hand, simulated.

    Attributes:
        name: in words.
        seconds: of a step.
        memory: bytes on the fullest rank, with what its device reserves.
        fits: true where the device has as much.
        exposed: seconds of exchanges that nothing hides, the mean of all ranks.
        hidden: seconds in which exchanges run beside computing.
    """

    name: str
    seconds: float
    memory: int
    fits: bool
    exposed: float
    hidden: float


@final
@dataclass(frozen=True)
class Shape:
    """What the strategies of a model are written with.

    Attributes:
        columns: patterns of layers that are cut by columns.
        rows: patterns of layers that are cut by rows.
        blocks: that stages can be made of.
        samples: of the batch.
    """

    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    blocks: int = 1
    samples: int = 0


GPT_SHAPE = Shape(("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down"))
MLP_SHAPE = Shape(columns=("0", "4"), rows=("2", "6"))
_LLAMA = "model.layers.*"
LLAMA_SHAPE = Shape(
    (
        *(f"{_LLAMA}.self_attn.{each}_proj" for each in "qkv"),
        f"{_LLAMA}.mlp.gate_proj",
        f"{_LLAMA}.mlp.up_proj",
    ),
    (f"{_LLAMA}.self_attn.o_proj", f"{_LLAMA}.mlp.down_proj"),
)


def by_hand(devices: int, shape: Shape) -> Iterator[tuple[str, weft.Strategy]]:
    """Data parallel, ZeRO 1 to 3, Megatron grids, and pipelines on all devices, by name."""
    yield "data parallel", replace(weft.data_parallel(), grid=(devices,))
    for level in (1, 2, 3):
        zero = weft.Zero(level)
        yield f"ZeRO {level}", replace(weft.data_parallel(), zero=zero, grid=(devices,))
    for tensor in _powers(min(devices, 8) if shape.columns else 1):
        if tensor > 1:
            for level in (0, 1):
                yield from _grid(devices, tensor, 1, 1, "", level, shape)
    for stages in _powers(min(devices, shape.blocks)):
        for tensor in _powers(min(devices // stages, 8) if shape.columns else 1):
            for times in (2, 4) if stages > 1 else ():
                for schedule in SCHEDULES:
                    yield from _grid(devices, tensor, stages, times * stages, schedule, 0, shape)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _grid(
    devices: int,
    tensor: int,
    stages: int,
    micro_batches: int,
    schedule: str,
    level: int,
    shape: Shape,
) -> Iterator[tuple[str, weft.Strategy]]:
    """Data x tensor x stages, where the numbers divide each other."""
    data = devices // tensor // stages
    cut = micro_batches > 1 and (not shape.samples or shape.samples % (data * micro_batches))
    if data * tensor * stages != devices or cut or (level and data == 1):
        return
    made = weft.hybrid_parallel(shape.columns, shape.rows) if tensor > 1 else weft.data_parallel()
    parts = [f"data {data}", *([f"tensor {tensor}"] if tensor > 1 else [])]
    parts += [f"{stages} stages, {schedule}, {micro_batches} micro-batches"] if stages > 1 else []
    parts += [f"ZeRO {level}"] if level else []
    yield (
        " x ".join(parts),
        replace(
            made,
            stages=stages if stages > 1 else (),
            micro_batches=micro_batches,
            schedule=schedule or None,  # type: ignore[arg-type]
            zero=weft.Zero(1) if level else None,
            grid=(stages * data, tensor) if tensor > 1 else (devices,),
        ),
    )


def simulated(step: StoredStep, topology: str, name: str, strategy: weft.Strategy) -> Hand | str:
    """A strategy as `weft.simulate` finds it, or why it cannot be planned."""
    precise = replace(
        strategy, precision=strategy.precision or step.in_precision(weft.Strategy()).precision
    )
    try:
        found = weft.simulate(step, precise, topology)
    except (UserError, InternalError) as error:
        return f"{name}: {str(error)[:120]}"
    memory = found.memory
    assert memory is not None  # plans say it
    fits = memory.fits is not False
    return Hand(name, found.step_seconds, memory.total, fits, found.exposed, found.hidden)


@final
@dataclass(frozen=True)
class Beside:
    """A search beside plans of others for the same step: none of theirs that fits may be quicker.

    Attributes:
        what: the case, in words.
        job: makes the step.
        topology: of the machine.
        plans: by name, drawn one by one.
        base: precision and micro-batches that all have in common.
        limit: bytes of a device, where they are fewer than it has.
        least: how many times as fast as the best of the plans the search must be, `target` in words.
        patience: seconds that the plans may take, all together.
    """

    what: str
    job: Callable[[], weft.Job]
    topology: str
    plans: Callable[[], Iterable[tuple[str, weft.Strategy]]]
    base: weft.Strategy | None = None
    limit: int | None = None
    least: float = 1 - 1e-3
    target: str = "found, or beaten"
    patience: float = inf

    def tried(self, seconds: float) -> Sequence[Finding]:
        """What a search of so many seconds finds, beside them."""
        step = stored(self.job(), self.base)
        fits, others = self._simulated(step)
        options = {"fixed": self.base} if self.base else {}
        made = searched(step, self.topology, seconds=seconds, memory_limit=self.limit, **options)
        if isinstance(made, str):
            told = f"no strategy: {made}"
            return [Finding(self.what, self.target, told, False, "; ".join(others[:3]))]
        found = made.result
        why = [*others[:3], f"{len(others)} do not fit, or cannot be planned"] if others else []
        why += [f"bound {found.gap:.0%} below", made.left]
        if not fits:
            told = f"{made}; none of the others fits"
            return [Finding(self.what, self.target, told, None, "; ".join(why))]
        ratio, unhidden = fits[0].seconds / found.seconds, None
        word = "found" if abs(ratio - 1) < 1e-3 else "beaten" if ratio > 1 else "missed"
        for plain in (each for each in fits if each.name == "data parallel"):
            # The gain over data parallel as it would be with all its exchanges after one another.
            unhidden = (plain.seconds + plain.hidden) / found.seconds
            hidden, exposed = seconds_text(plain.hidden), seconds_text(plain.exposed)
            why.append(
                f"data parallel hides {hidden} of exchanges, {exposed} not: {unhidden:.2f}x one that hides nothing"
            )
        best = "; ".join(f"{each.name} {seconds_text(each.seconds)}" for each in fits[:4])
        figures = {
            "ratio": ratio,
            "found": found.seconds,
            "bound": found.bound,
            "search_seconds": made.took,
            "planned": len(found.tried),
            "nodes": len(step.graph.nodes),
            "unhidden": unhidden,
            "others": {each.name: each.seconds for each in fits},
        }
        told = f"{word}, {ratio:.3f}x: {made} (of {len(fits)}: {best})"
        held = ratio >= self.least
        return [Finding(self.what, self.target, told, held, "; ".join(why), figures)]

    def _simulated(self, step: StoredStep) -> tuple[list[Hand], list[str]]:
        """The plans that have room, the quickest first; and why others have not, or were not simulated."""
        found, said = list[Hand](), list[str]()
        ends = monotonic() + self.patience
        for name, strategy in self.plans():
            if monotonic() > ends:
                said.append(f"{name}: no time")
                continue
            one = simulated(step, self.topology, name, strategy)
            if isinstance(one, str):
                said.append(one)
            elif one.fits and (self.limit is None or one.memory <= self.limit):
                found.append(one)
            else:
                said.append(f"{name}: takes {one.memory / 1e9:.1f} GB")
        return sorted(found, key=lambda each: each.seconds), said
