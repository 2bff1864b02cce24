"""Splits of a dimension with fewer elements than ranks, so that some ranks have empty shards.

Deduction does not choose them by itself. If the user asks for one (a batch of 3 on 4 ranks), it may continue along
the ops that carry the dimension: what reads or makes a value that is split thinly may be split so too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, final

from weft.compiler.decompositions.table import legal_signatures
from weft.compiler.hints import Hints, Thin, hinted_sbps, is_hint
from weft.ir.logical import Call, Input, LogicalGraph, Update
from weft.layout import SBP, Placement, Split

# For each value where its splits may be thin; a value without any has no entry.
ThinSplits: TypeAlias = Mapping[str, Thin]


def splits_with_empty_shards(graph: LogicalGraph, hints: Hints, placement: Placement) -> ThinSplits:
    """The consequences of the user's thin splits, in both directions along the graph."""
    spread = _Spread(graph, placement.shape)
    sbps: Sequence[SBP | None]
    for node in graph.nodes:
        if isinstance(node, Input) and node.key in hints.inputs:
            value, sbps = node.value, hints.inputs[node.key]
        elif isinstance(node, Call) and is_hint(node) and node.outputs[0]:
            value, sbps = node.outputs[0], hinted_sbps(node, placement)
        else:
            continue
        for dim, size in enumerate(value.shape):
            axes = [axis for axis, sbp in enumerate(sbps) if sbp == Split(dim)]
            if prod(placement.shape[axis] for axis in axes) > size:
                spread.add(value.name, ((axis, dim) for axis in axes))
    while spread.changed:
        spread.step()
    return {name: frozenset(found) for name, found in spread.thin.items()}


@final
@dataclass
class _Spread:
    """The thin splits found so far; `changed` says whether the last round found any."""

    graph: LogicalGraph
    grid: tuple[int, ...]
    thin: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    changed: bool = False

    def add(self, name: str, splits: Iterable[tuple[int, int]]) -> None:
        for split in splits:
            known = self.thin.setdefault(name, set())
            self.changed = self.changed or split not in known
            known.add(split)

    def step(self) -> None:
        """Once along all nodes, forward and back."""
        self.changed = False
        for node in (*self.graph.nodes, *reversed(self.graph.nodes)):
            if isinstance(node, Call):
                self._call(node)
            elif isinstance(node, Update):
                self._same(node.target.name, node.source.name)

    def _call(self, node: Call) -> None:
        names = (*node.operands, *node.output_names)
        if not any(name in self.thin for name in names):
            return
        if is_hint(node):
            self._same(names[0], names[1])
            return
        call = node.first
        for axis, parts in enumerate(self.grid):
            for signature in legal_signatures(call, parts, empty=True):
                sbps = (*signature.operands, *signature.results)
                pairs = zip(names, sbps, strict=True)
                dims = {name: s.dim for name, s in pairs if isinstance(s, Split)}
                if any((axis, dim) in self.thin.get(name, ()) for name, dim in dims.items()):
                    for name, dim in dims.items():
                        self.add(name, ((axis, dim),))

    def _same(self, one: str, other: str) -> None:
        self.add(one, tuple(self.thin.get(other, ())))
        self.add(other, tuple(self.thin.get(one, ())))
