"""The signature that a call has along each axis, beside the others that its rule admits, and what these would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from weft.boxing import EXCHANGES, steps
from weft.compiler.hints import is_hint
from weft.compiler.layouts.options import WorkOptions
from weft.compiler.layouts.problem import OpChoice
from weft.compiler.signatures import axis_signatures
from weft.errors import UserError
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, LogicalGraph, Value
from weft.ir.queries.op_calls import layout_of, op_call, operand_names
from weft.layout import SBP, Layout, Partial, Placement
from weft.ops import Signature
from weft.units import ITEM_SIZE, Bytes

# Signatures that are shown for an axis, the chosen one besides.
_SHOWN = 8
# Calls that differ, of which the signatures are weighed.
_MOST_CALLS = 400
# Costs of one signature: [its text, work, bytes that boxing moves, collectives, all together].
Weighed: TypeAlias = "list[Any]"


@final
@dataclass
class Choices:
    """The choices of a graph with layouts; calls that are alike share one, by its number in `found`.

    Costs are those that deduction minimises: bytes that cross between ranks, work weighed as such (`CostModel`). A
    signature is weighed alone: all other calls, and other axes, keep theirs; what it reads comes from the layouts in
    which it is made, and what it makes is brought to the layouts in which it is read.
    """

    graph: LogicalGraph
    model: CostModel = CostModel()  # noqa: RUF009 (frozen)
    found: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)
    _works: dict[tuple[int, ...], WorkOptions] = field(default_factory=dict)

    def of(self, node: Call) -> int:
        """The number of a call's choice; -1 where it has none: one rank, a hint, or no rule."""
        key = self._key(node)
        if key not in self._known:
            rows = [] if len(self.found) >= _MOST_CALLS or is_hint(node) else [*self._axes(node)]
            self._known[key] = len(self.found) if rows else -1
            if rows:
                self.found.append({"axes": rows})
        return self._known[key]

    def _key(self, node: Call) -> object:
        values = [self.graph.values[name] for name in operand_names(node)]
        reads = tuple((self._made(each.name).layout, each.layout) for each in values)
        makes = tuple(v and (v.layout, self._wanted(v)) for v in node.outputs)
        return op_call(self.graph, node), reads, makes

    def _made(self, name: str) -> Value:
        """A value as it was made, before it was boxed on its placement."""
        values, producers = self.graph.values, self.graph.producers
        value, node = values[name], producers[name]
        while isinstance(node, Box):
            before = values[node.input.name]
            if layout_of(before).placement != layout_of(value).placement:
                break
            value, node = before, producers[before.name]
        return value

    def _wanted(self, made: Value) -> tuple[Layout, ...]:
        """The layouts in which a value is read: its own, and those that it is boxed to on its placement."""
        own, found = layout_of(made), dict[Layout, None]()
        for reader in self.graph.users[made.name]:
            boxed = layout_of(reader.output) if isinstance(reader, Box) else own
            found[boxed if boxed.placement == own.placement else own] = None
        return tuple(found)

    def _axes(self, node: Call) -> Iterator[dict[str, Any]]:
        values = [self.graph.values[name] for name in operand_names(node)]
        laid = [*values, *(value for value in node.outputs if value is not None)]
        if not laid:
            return
        placement = layout_of(laid[0]).placement
        chosen = tuple(signature for signature, _ in axis_signatures(self.graph, node))
        for axis, parts in enumerate(placement.shape):
            if parts > 1:
                rows = self._rows(node, placement, axis, chosen)
                if len(rows) > 1 or (rows and rows[0][0] != str(chosen[axis])):
                    yield {"axis": axis, "ranks": parts, "chosen": str(chosen[axis]), "rows": rows}

    def _rows(
        self, node: Call, placement: Placement, axis: int, chosen: tuple[Signature, ...]
    ) -> list[Weighed]:
        """The cheapest signatures along an axis, and the chosen one, the cheapest first."""
        grid = placement.shape
        works = self._works.setdefault(grid, WorkOptions(grid, self.model))
        call = OpChoice(op_call(self.graph, node), node)
        try:
            options = works.of(call, axis, chosen)
            costs = zip(options.signatures, options.costs, strict=True)
            rows = [self._weighed(node, axis, each, float(work)) for each, work in costs]
        except UserError:  # an op without a rule runs whole
            return []
        rows.sort(key=lambda row: row[-1])
        own = [row for row in rows[_SHOWN:] if row[0] == str(chosen[axis])]
        return rows[:_SHOWN] + own

    def _weighed(self, node: Call, axis: int, signature: Signature, work: float) -> Weighed:
        moved, collectives = 0, 0
        for name, sbp in zip(operand_names(node), signature.operands, strict=True):
            value = self.graph.values[name]
            wanted = _with(layout_of(value), axis, sbp)
            size, times = _boxed(value, layout_of(self._made(name)), wanted)
            moved, collectives = moved + size, collectives + times
        for made, sbp in zip(node.outputs, signature.results, strict=True):
            if made is not None:
                source = _with(layout_of(made), axis, sbp)
                for wanted in self._wanted(made):
                    size, times = _boxed(made, source, wanted)
                    moved, collectives = moved + size, collectives + times
        total = work + self.model.boxing(Bytes(moved), collectives)
        return [str(signature), round(work), moved, collectives, round(total)]


def _with(layout: Layout, axis: int, sbp: SBP) -> Layout:
    return Layout(layout.placement, (*layout.sbp[:axis], sbp, *layout.sbp[axis + 1 :]))


def _boxed(value: Value, source: Layout, target: Layout) -> tuple[int, int]:
    """Bytes that boxing moves, and its collectives. Nothing is made a part of a sum for a reader."""
    if source == target:
        return 0, 0
    before = [isinstance(each, Partial) for each in source.sbp]
    if any(isinstance(a, Partial) and not b for a, b in zip(target.sbp, before, strict=True)):
        # Whole values count as the first part of a sum; nothing moves for that.
        kept = (
            s if isinstance(t, Partial) else t for s, t in zip(source.sbp, target.sbp, strict=True)
        )
        target = Layout(target.placement, tuple(kept))
    chain = steps(source, target, value.shape, ITEM_SIZE.get(value.dtype, 8))
    return sum(one.bytes for one in chain), sum(one.kind in EXCHANGES for one in chain)
