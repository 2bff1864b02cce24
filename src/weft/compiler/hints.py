"""Hints: the layouts that the user fixed, checked against the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.errors import LayoutError
from weft.ir.logical import Call, Input, LogicalGraph, Value
from weft.layout import SBP, Partial, Placement, Shares, Split, reductions_of
from weft.ops import Signature

# (axis of the grid, dimension of a tensor): where a split may leave ranks without elements.
Thin: TypeAlias = frozenset[tuple[int, int]]


@final
@dataclass(frozen=True)
class Hints:
    """The layouts that the user fixed.

    Attributes:
        inputs: for an input's key, one SBP for each axis of the placement; None leaves the axis
            free.
        stored: for a parameter's key, the axis along which its split says how it is stored, not
            how it is used (`weft.compiler.training.shards`).
        shares: for a variable's key, in which order another program stores it; no other variable
            is in shares then. None if none has decided that (`weft.compiler.graph.shares`).
        leaving: names of values that other stages read: they are never sent as Partial, so their
            reduction is a cost of the stage that makes them.
        signatures: of single calls, by the name of the first result, one for each axis.
        whole: keys of parameters that are whole: where `inputs` splits one, its readers take parts of it.
    """

    inputs: Mapping[str, tuple[SBP | None, ...]] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, Shares] | None = None
    leaving: frozenset[str] = frozenset()
    signatures: Mapping[str, tuple[Signature, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()


# The user's hints, by the number of axes of a placement.
GridHints: TypeAlias = Mapping[int, Hints]


def check_hints(graph: LogicalGraph, hints: Hints, placement: Placement) -> None:
    """Raise LayoutError when a hint for an input cannot hold."""
    inputs = {node.key: node for node in graph.of_kind(Input)}
    for key, sbps in hints.inputs.items():
        if key not in inputs:
            raise LayoutError(
                f"the hint for {key!r} names no input of the step {graph.name!r}; expected one, such as "
                f"{', '.join(list(inputs)[:5])}"
            )
        _check(f"the hint for {key!r}", inputs[key].value, sbps, placement)
        partial = next((sbp for sbp in sbps if isinstance(sbp, Partial)), None)
        if partial is not None:
            raise LayoutError(
                f"the hint for {key!r}: an input is split or broadcast, got {partial}"
            )


def is_hint(node: object) -> bool:
    """True if a node passes its value on as it is, in the layout that its hint says."""
    return isinstance(node, Call) and node.hint is not None


def hinted_sbps(node: Call, placement: Placement) -> tuple[SBP | None, ...]:
    """The SBPs, one for each axis, that a hint gives to its value; a single SBP holds for all axes.

    None stands for an axis that it leaves free. Dimensions may count from the back.

    Raises:
        LayoutError: when it does not fit the value.
    """
    hint, value = node.hint, node.outputs[0]
    assert hint is not None
    assert value is not None  # a hint returns the tensor that it was given
    where = f"weft.hint(…, '{hint}') at {node.location}"
    rank = len(value.shape)
    sbps = tuple(
        Split(sbp.dim % rank if -rank <= sbp.dim < rank else abs(sbp.dim))
        if isinstance(sbp, Split)
        else sbp
        for sbp in hint.sbps
    )
    every = sbps * placement.axes if len(sbps) == 1 else sbps
    _check(where, value, every, placement)
    return every


def enough_elements(
    shape: tuple[int, ...],
    sbps: Sequence[SBP | None],
    grid: tuple[int, ...],
    thin: Thin = frozenset(),
) -> bool:
    """True if every rank gets at least one element along each dimension that is split.

    Args:
        sbps: one for each axis of the grid; None is not a split.
        thin: where it does not matter: see `weft.compiler.layouts.empty_shards`.
    """
    pieces: dict[int, int] = {}
    for sbp, parts in zip(sbps, grid, strict=True):
        if isinstance(sbp, Split):
            pieces[sbp.dim] = pieces.get(sbp.dim, 1) * parts
    short = {dim for dim, count in pieces.items() if dim >= len(shape) or shape[dim] < count}
    return all(
        (axis, sbp.dim) in thin
        for axis, sbp in enumerate(sbps)
        if isinstance(sbp, Split) and sbp.dim in short
    )


def _check(where: str, value: Value, sbps: tuple[SBP | None, ...], placement: Placement) -> None:
    shape = list(value.shape)
    if len(sbps) != placement.axes:
        raise LayoutError(
            f"{where}: one SBP for each of the {placement.axes} axes of {placement} expected, got {len(sbps)}"
        )
    for sbp in sbps:
        if isinstance(sbp, Split) and not 0 <= sbp.dim < len(shape):
            raise LayoutError(
                f"{where} splits dimension {sbp.dim}, but the tensor of shape {shape} has "
                f"{len(shape)} dimension{'s' if len(shape) != 1 else ''}, counted from 0; "
                "split one of these, or use weft.broadcast"
            )
        if isinstance(sbp, Partial) and sbp.reduction not in reductions_of(value.dtype):
            raise LayoutError(
                f"{where}: {sbp} has no meaning for {value.dtype}, which takes "
                f"{', '.join(reductions_of(value.dtype))}"
            )
