"""A row's step as `weft.simulate` finds it, planned as a user would: its model, a strategy, a machine of the catalogue.

A decoder is planned with two small numbers of blocks and of micro-batches, and its seconds are extended along lines to
as many as the row has, its bytes along that of blocks. Nothing is fitted to a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import weft
from benchmarks.accuracy.decoder import Decoder, Form, token_loss
from benchmarks.accuracy.row import Residual, Row
from benchmarks.works.work import class_loss
from examples.models.resnet import ResNet
from weft.planning.stored_step import StoredStep

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# Parts of the model that are computed again.
AGAIN = {"none": (), "selective": ("blocks.*.attention.core",), "full": ("blocks.*",)}
S, B = weft.split(0), weft.broadcast


@dataclass(frozen=True)
class Predicted:
    """A row's step.

    Attributes:
        seconds: of the step.
        memory: bytes that the fullest rank takes, with what its device reserves.
        reserve: those that its device reserves.
        capacity: bytes that the device has.
    """

    seconds: float
    memory: float
    reserve: float
    capacity: float

    @property
    def fits(self) -> bool:
        return self.memory <= self.capacity


def predict(row: Row) -> Predicted:
    """A row's step; where its form of recomputation is not told, with the least that fits the device."""
    for form in ("none", "selective"):
        if row.recompute in ("", form):
            found = _extended(replace(row, recompute=form))
            if row.recompute or found.fits:
                return found
    return _extended(replace(row, recompute="full"))


def _extended(row: Row) -> Predicted:
    """A step from smaller ones: blocks and micro-batches are added along lines."""
    if isinstance(row.form, Residual):
        return _simulated(row, 1)
    stages = row.pipeline * row.chunks
    blocks = _sizes(row.layers, stages if stages > 1 else 2)
    micros = _sizes(row.micro_batches, 2 * stages)
    found = {
        (few, micro): _simulated(replace(row, micro_batches=micro), few)
        for few in blocks
        for micro in micros
    }

    seconds = [
        _line(row.micro_batches, micros, [found[few, micro].seconds for micro in micros])
        for few in blocks
    ]
    # What is held does not grow with micro-batches above the depth of the pipeline.
    memory = [found[few, micros[-1]].memory for few in blocks]
    return replace(
        found[blocks[0], micros[0]],
        seconds=_line(row.layers, blocks, seconds),
        memory=_line(row.layers, blocks, memory),
    )


def _sizes(count: int, few: int) -> tuple[int, ...]:
    """Sizes whose results are extended to `count`: some and twice as many, or as many as there are."""
    return (count,) if count <= 2 * few else (few, 2 * few)


def _line(at: int, places: Sequence[int], values: Sequence[float]) -> float:
    """The value at a place, on the line through one or two others."""
    first, last = places[0], places[-1]
    if first == last:
        return values[0]
    return values[0] + (at - first) / (last - first) * (values[-1] - values[0])


def _simulated(row: Row, blocks: int) -> Predicted:
    """The step of a model of so many blocks."""
    strategy = strategy_of(row)
    sequences = row.sequences * row.micro_batches * row.data
    step = _stored(row.form, blocks, sequences, row.dtype)
    found = weft.simulate(
        step,
        strategy,
        f"{row.topology}x{row.devices}",
        grid=grid_of(row),
    )
    assert found.memory is not None  # plans say it
    assert found.memory.capacity is not None  # of devices of the catalogue
    memory, capacity = found.memory.total, found.memory.capacity
    return Predicted(found.step_seconds, memory, found.memory.reserve, capacity)


@lru_cache(maxsize=8)
def _stored(form: Form | Residual, blocks: int, sequences: int, dtype: str) -> StoredStep:
    """The captured step, on the meta device."""
    with torch.device("meta"):
        model: torch.nn.Module
        if isinstance(form, Residual):
            model = ResNet(classes=form.classes, width=form.width, widening=form.widening)
            loss = class_loss
            x = torch.empty(sequences, 3, form.side, form.side, dtype=DTYPES[dtype])
            y = torch.empty(sequences, dtype=torch.int64)
        else:
            model, loss = Decoder(form, blocks), token_loss
            x = y = torch.empty(sequences, form.length, dtype=torch.int64)
        model = model.to(DTYPES[dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    job = weft.Job(model, loss, optimizer, {"x": x, "y": y})
    return job.stored(strategy=weft.Strategy(**_masters(dtype)))


def _masters(dtype: str) -> dict[str, Any]:
    return {"precision": None if dtype == "float32" else weft.Precision(masters=True)}


def grid_of(row: Row) -> tuple[int, ...]:
    """Pipeline x data x tensor; an axis of one rank but that of data is left out."""
    axes = (row.pipeline, row.data, row.tensor)
    return tuple(size for axis, size in enumerate(axes) if size > 1 or axis == 1)


def strategy_of(row: Row) -> weft.Strategy:
    """The strategy of a row, on its grid."""
    stages = row.pipeline * row.chunks
    above = (B,) if row.pipeline > 1 else ()  # on the axis of stages
    given: dict[str, Any] = {
        "stages": stages if stages > 1 else (),
        "micro_batches": row.micro_batches,
        "schedule": row.schedule if stages > 1 else None,
        "zero": weft.Zero(row.zero, axis=len(above)) if row.zero and row.data > 1 else None,  # type: ignore[arg-type]
        "recompute": AGAIN[row.recompute],
        **_masters(row.dtype),
    }
    form = row.form
    if isinstance(form, Residual):
        given["recompute"] = ("blocks.*",) if row.recompute == "full" else ()
    if row.tensor == 1 or not isinstance(form, Form):
        return weft.Strategy(batch={"*": (*above, S)}, parameters={"*": B}, **given)
    columns = ["blocks.*.attention.qkv", "blocks.*.feed.up"]
    columns += ["blocks.*.feed.gate"] if form.llama else []
    columns += [] if form.tied else ["head"]
    rows = ["blocks.*.attention.proj", "blocks.*.feed.down"]
    laid = weft.hybrid_parallel(columns, rows, 1 if row.sequence_parallel else None)

    def below(layouts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: (*above, *sbps) for name, sbps in layouts.items()}

    return weft.Strategy(
        batch=below(laid.batch),
        parameters={**below(laid.parameters), "token.weight": (*above, B, S)},
        activations=below(laid.activations),
        **given,
    )
