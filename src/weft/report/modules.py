"""The model as rows: parameters and buffers with their layouts, modules with their lines and calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, final

from weft.boxing import EXCHANGES, steps
from weft.compiler.hints import is_hint
from weft.compiler.layouts.options import Known
from weft.compiler.layouts.problem import OpChoice
from weft.compiler.pipeline import Compiled
from weft.compiler.signatures import axis_signatures
from weft.errors import UserError
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, Input, Location, LogicalGraph, Update, Value
from weft.layout import SBP, Layout, Partial, Placement
from weft.ops import Signature
from weft.patterns import first_match
from weft.strategy.parts import level_of, zero_rules
from weft.strategy.strategy import Strategy
from weft.traces.events import near
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
    _works: dict[tuple[int, ...], Known] = field(default_factory=dict)

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
        values = [self.graph.values[name] for name in node.operands]
        reads = tuple((self._made(each.name).layout, each.layout) for each in values)
        makes = tuple(v and (v.layout, self._wanted(v)) for v in node.outputs)
        return node.first, reads, makes

    def _made(self, name: str) -> Value:
        """A value as it was made, before it was boxed on its placement."""
        values, producers = self.graph.values, self.graph.producers
        value, node = values[name], producers[name]
        while isinstance(node, Box):
            before = values[node.input.name]
            if before.laid.placement != value.laid.placement:
                break
            value, node = before, producers[before.name]
        return value

    def _wanted(self, made: Value) -> tuple[Layout, ...]:
        """The layouts in which a value is read: its own, and those that it is boxed to on its placement."""
        own, found = made.laid, dict[Layout, None]()
        for reader in self.graph.users[made.name]:
            boxed = reader.output.laid if isinstance(reader, Box) else own
            found[boxed if boxed.placement == own.placement else own] = None
        return tuple(found)

    def _axes(self, node: Call) -> Iterator[dict[str, Any]]:
        values = [self.graph.values[name] for name in node.operands]
        laid = [*values, *(value for value in node.outputs if value is not None)]
        if not laid:
            return
        placement = laid[0].laid.placement
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
        works = self._works.setdefault(grid, Known(grid, self.model))
        call = OpChoice(node.first, node)
        try:
            options = works.of(call, (axis,), chosen)
            costs = zip(options.signatures, options.costs, strict=True)
            rows = [self._weighed(node, axis, each[axis], float(work)) for each, work in costs]
        except UserError:  # an op without a rule runs whole
            return []
        rows.sort(key=lambda row: row[-1])
        own = [row for row in rows[_SHOWN:] if row[0] == str(chosen[axis])]
        return rows[:_SHOWN] + own

    def _weighed(self, node: Call, axis: int, signature: Signature, work: float) -> Weighed:
        moved, collectives = 0, 0
        for name, sbp in zip(node.operands, signature.operands, strict=True):
            value = self.graph.values[name]
            wanted = _with(value.laid, axis, sbp)
            size, times = _boxed(value, self._made(name).laid, wanted)
            moved, collectives = moved + size, collectives + times
        for made, sbp in zip(node.outputs, signature.results, strict=True):
            if made is not None:
                source = _with(made.laid, axis, sbp)
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


def model_rows(compiled: Compiled, strategy: Strategy | None) -> dict[str, Any]:
    """The rows of the tree, and the choices that they name; `strategy`, for reasons, is that of the plan."""
    choices = Choices(compiled.graph)
    rows = [*_variables(compiled, strategy), *_modules(compiled.graph, choices)]
    return {"rows": rows, "choices": choices.found}


def _variables(compiled: Compiled, strategy: Strategy | None) -> Iterator[dict[str, Any]]:
    graph, homes = compiled.graph, compiled.stages.homes
    inputs = graph.of_kind(Input)
    keys = {node.value.name: node.key for node in inputs}
    states = {
        keys[update.target.name]: [keys[ref.name] for ref in update.states if ref.name in keys]
        for update in graph.of_kind(Update)
        if update.target.name in keys
    }
    laid = {node.key: node.value for node in inputs}
    for node in inputs:
        if node.role in ("parameter", "buffer"):
            own = {key.removeprefix(f"{node.key}."): laid[key] for key in states.get(node.key, ())}
            yield {
                "path": node.key,
                "role": node.role,
                **_tensor(node.value),
                "stage": homes.get(node.key, 0),
                "stored": compiled.stored.get(node.key),
                "states": {name: _tensor(value) for name, value in own.items()},
                "why": [*_reasons(node.key, compiled, strategy)],
            }


def _reasons(key: str, compiled: Compiled, strategy: Strategy | None) -> Iterator[str]:
    """The entries of a strategy that say how a variable is laid out."""
    if key in compiled.stored:
        yield f"stored in shards along axis {compiled.stored[key]}, and used whole"
    if strategy is None:
        return
    level = level_of(zero_rules(strategy.zero), key)
    if level:
        yield f"ZeRO {level}, as the strategy says"
    pattern = first_match(strategy.parameters, key)
    yield (
        "its layout is deduced: the cheapest for all calls together"
        if pattern is None
        else f'parameters["{pattern}"] of the strategy fixes its layout'
    )


def _tensor(value: Value) -> dict[str, Any]:
    layout = value.layout
    return {
        "shape": list(value.shape),
        "dtype": value.dtype,
        "bytes": prod(value.shape) * ITEM_SIZE.get(value.dtype, 8),
        "layout": [] if layout is None else [str(sbp) for sbp in layout.sbp],
        "grid": [] if layout is None else list(layout.placement.shape),
        "ranks": [] if layout is None else _spans(layout.placement.ranks),
    }


def _spans(ranks: tuple[int, ...]) -> list[list[int]]:
    """Ranks as runs of neighbours: first and last of each."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _modules(graph: LogicalGraph, choices: Choices) -> Iterator[dict[str, Any]]:
    """A row for each module whose forward made calls."""
    calls: dict[str, list[tuple[Call, Location]]] = {}
    for node in graph.of_kind(Call):
        if node.location is not None:
            calls.setdefault(node.location.module, []).append((node, node.location))
    for path, every in calls.items():
        again = sum(call.phase.kind != "forward" and not where.backward for call, where in every)
        yield {
            "path": path,
            "role": "module",
            "lines": list(dict.fromkeys(_line(where) for _, where in every)),
            "stages": sorted({call.phase.stage for call, _ in every}),
            "again": again,
            "calls": [
                [*shown, times]
                for shown, times in Counter(
                    _call(graph.values, choices, call, where) for call, where in every
                ).items()
            ],
        }


def _call(
    values: Mapping[str, Value], choices: Choices, call: Call, where: Location
) -> tuple[str, str, str, str, int]:
    """A call as it is shown: its op, line, pass, shapes, and the number of its choice."""
    forward = call.phase.kind == "forward"
    phase = call.phase.kind if forward or where.backward else "made again"
    shapes = ", ".join(_short(values[name]) for name in call.operands)
    made = ", ".join(_short(value) for value in call.makes)
    return call.op, _line(where), phase, f"{shapes} → {made}", choices.of(call)


def _line(where: Location) -> str:
    return near(f"{where.file}:{where.line}")


def _short(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
