"""From a strategy's name patterns to hints: the SBP of each batch entry, parameter and buffer that the user fixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from weft.compiler.hints import Hints
from weft.errors import LayoutError, StrategyError
from weft.ir.logical import Input, LogicalGraph
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.ops import Signature
from weft.patterns import check_named, first_match, matches
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs, signature_sides


def strategy_hints(
    strategy: Strategy, graph: LogicalGraph, placements: Sequence[Placement]
) -> dict[int, Hints]:
    """The hints that `strategy` gives for the inputs of `graph`, by the number of axes of a stage's placement.

    One SBP stands for all axes, of any number; a tuple counts on placements with as many axes.

    Raises:
        StrategyError: when a pattern names nothing, or gives a wrong number of SBPs.
        LayoutError: when a split does not fit a tensor.
    """
    inputs = graph.of_kind(Input)
    batch = [node for node in inputs if node.role == "batch"]
    variables = [node for node in inputs if node.role in ("parameter", "buffer")]
    _check("batch", strategy.batch, batch, placements)
    _check("parameters", strategy.parameters, variables, placements)
    return {
        axes: Hints(
            _matched("batch", strategy.batch, batch, axes)
            | _matched("parameters", strategy.parameters, variables, axes),
            signatures={
                op: tuple(Signature(*signature_sides(one)) for one in every)
                for op, text in strategy.signatures.items()
                if len(every := (text,) * axes if isinstance(text, str) else text) == axes
            },
        )
        for axes in {placement.axes for placement in placements}
    }


def split_parameters(strategy: Strategy, names: Iterable[str]) -> frozenset[str]:
    """The names of parameters that `strategy` splits, along any axis of any placement."""

    def splits(name: str) -> bool:
        for sbp in (sbp for p, sbp in strategy.parameters.items() if matches(p, name)):
            if any(isinstance(part, Split) for part in (sbp if isinstance(sbp, tuple) else (sbp,))):
                return True
            if not isinstance(sbp, tuple):
                return False  # counts on all placements, a tuple on those with as many axes
        return False

    return frozenset(filter(splits, names))


def batch_hints(
    strategy: Strategy, graph: LogicalGraph, hints: Mapping[int, Hints]
) -> dict[int, Hints]:
    """Hints that fix leaves of another batch than the training step's, too, where its strategy fits them."""
    batch = [node for node in graph.of_kind(Input) if node.role == "batch"]
    found = {}
    for axes, own in hints.items():
        fitting: dict[str, tuple[SBP | None, ...]] = {}
        for node in batch:
            with suppress(LayoutError):  # no dimension of another shape
                fitting |= _matched("batch", strategy.batch, [node], axes)
        found[axes] = replace(own, inputs={**fitting, **own.inputs})
    return found


def with_leaves(hints: Mapping[int, Hints], leaves: Mapping[str, Layout]) -> dict[int, Hints]:
    """Hints that fix entries of the batch to how they are laid out, too, where nothing else is said of them."""
    return {
        axes: replace(
            own,
            inputs={
                **{
                    key: layout.sbp
                    for key, layout in leaves.items()
                    if layout.placement.axes == axes
                },
                **own.inputs,
            },
        )
        for axes, own in hints.items()
    }


def _check(
    field: str,
    patterns: Mapping[str, SBPs],
    inputs: Sequence[Input],
    placements: Sequence[Placement],
) -> None:
    keys = [node.key for node in inputs]
    for pattern, sbp in patterns.items():
        matching = [node for node in inputs if matches(pattern, node.key)]
        # A layer whose weight is named as well need not have a bias.
        layer = pattern.removesuffix(".bias")
        if layer == pattern or f"{layer}.weight" not in patterns:
            check_named(f"{field}={{{pattern!r}: …}}", pattern, keys, "names")
        axes = {placement.axes for placement in placements}
        if matching and isinstance(sbp, tuple) and len(sbp) not in axes:
            where = " or ".join(dict.fromkeys(f"{p.axes} axes of {p}" for p in placements))
            raise StrategyError(
                f"{_where(field, pattern, matching[0])}: one SBP for each of the {where} expected, "
                f"got {len(sbp)}"
            )


def _matched(
    field: str, patterns: Mapping[str, SBPs], inputs: Sequence[Input], axes: int
) -> dict[str, tuple[SBP | None, ...]]:
    fitting = {
        pattern: sbp
        for pattern, sbp in patterns.items()
        if not isinstance(sbp, tuple) or len(sbp) == axes
    }
    found: dict[str, tuple[SBP | None, ...]] = {}
    for node in inputs:
        chosen = first_match(fitting, node.key)
        if chosen is not None:
            sbp, where = fitting[chosen], _where(field, chosen, node)
            every = sbp if isinstance(sbp, tuple) else (sbp,) * axes
            # A pattern for many tensors passes over scalars: they have no dimension to split.
            passed = not node.value.shape and chosen != node.key
            found[node.key] = tuple(
                Broadcast() if passed else _from_front(where, part, node) for part in every
            )
    return found


def _from_front(where: str, sbp: SBP, node: Input) -> SBP:
    rank = len(node.value.shape)
    if isinstance(sbp, Partial):
        raise LayoutError(f"{where}: an input is split or broadcast, got {sbp}")
    if not isinstance(sbp, Split):
        return sbp
    if not -rank <= sbp.dim < rank:
        raise LayoutError(
            f"{where}: there is no dimension {sbp.dim} to split; use weft.broadcast, or a dimension that the tensor has"
        )
    return Split(sbp.dim % rank)


def _where(field: str, pattern: str, node: Input) -> str:
    return f"{field}={{{pattern!r}: …}} for {node.key} of shape {list(node.value.shape)}"
