"""Tensors that ranks exchange in every plan of a step: gradients of weights, and sums around layers that are cut.

They follow from the captured step. If layers are cut along the tensor axis, what one by rows returns is a part of a sum
until something reads it that is not a sum itself; so is the gradient of what one by columns reads (Megatron-LM, arXiv
1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple, final

from weft.ir.logical import Call, Input, LogicalGraph, Update
from weft.ops.rule import has_rule, rule_of
from weft.search.steps.linears import PRODUCTS, TURNS, forward
from weft.units import ITEM_SIZE, Bytes

# More bytes than any weight has: nothing else keeps a sum away.
_MANY = Bytes(1 << 62)
_CONVOLUTION = "aten.convolution.default"
# Calls that only look at the elements of a tensor in another shape.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default"),
        *("squeeze.dim", "squeeze.default", "clone.default", "alias.default", "detach.default"),
        *("_to_copy.default", "expand.default", "contiguous.default", "unflatten.int"),
    )
)


def trained(graph: LogicalGraph) -> tuple[Input, ...]:
    """The parameters that an optimizer updates: no other one needs a gradient."""
    updates = graph.of_kind(Update)
    targets = {each.target.name for each in updates if each.rule != "copy"}
    return tuple(node for node in graph.of_kind(Input) if node.value.name in targets)


@final
@dataclass(frozen=True)
class WeightGradient:
    """The gradient of a weight that a product or a convolution reads.

    Attributes:
        key: of the parameter.
        elements: of the weight.
        item: bytes of an element.
        around: bytes of the layer's input and output: if these are gathered, each rank computes the whole gradient.
    """

    key: str
    elements: int
    item: int
    around: Bytes


def gradients(graph: LogicalGraph) -> tuple[WeightGradient, ...]:
    """The gradients of all trained weights of products and convolutions, each parameter once."""
    keys = {node.value.name: node for node in trained(graph)}
    found: dict[str, WeightGradient] = {}
    for call in forward(graph):
        if call.op in TURNS and call.uses and call.uses[0] in keys:
            keys.update((value.name, keys[call.uses[0]]) for value in call.makes)
        elif call.op in PRODUCTS or call.op == _CONVOLUTION:
            weights = [keys[name] for name in call.uses if name in keys]
            for node in (each for each in weights if len(each.value.shape) > 1):
                others = [graph.values[name] for name in call.uses if name not in keys]
                before = found.get(node.key)
                around = sum(x.nbytes for x in (*others, *call.makes)) + (
                    before.around if before else 0
                )
                shape, item = node.value.shape, ITEM_SIZE[node.value.dtype]
                found[node.key] = WeightGradient(node.key, prod(shape), item, Bytes(around))
    return tuple(found.values())


@final
@dataclass(frozen=True)
class Sum:
    """A tensor that is added up over the tensor axis, in the forward or as a gradient.

    Attributes:
        size: bytes of it, whole.
        weights: bytes of the weights around it: if these are gathered, no sum is needed.
        once: true if no gradient passes through it, so that it may stay sharded.
    """

    size: Bytes
    weights: Bytes
    once: bool = False


def sums(graph: LogicalGraph, cuts: Mapping[str, str]) -> tuple[Sum, ...]:
    """The tensors that are added up over the tensor axis, at least."""
    if not cuts:
        return ()
    walk = _Walk(graph, cuts)
    for call in forward(graph):
        walk.over(call)
    return (*walk.forward, *walk.backward)


@final
class GradientPath(NamedTuple):
    """The path along which partial gradients flow.

    Attributes:
        size: bytes of its smallest tensor.
        weights: bytes of the weights at its end: with these gathered, it does not end there.
    """

    size: Bytes
    weights: Bytes


@final
class GradientPaths:
    """The ways of gradients: from a tensor back to where parts of it must have been added up.

    The sum is due at a trained parameter, and at the result of a row-parallel layer. A gradient may stay in parts up
    to there, as what is between is linear in it; so it may be added up where it is smallest. Ways that share no
    tensor need a sum each.
    """

    def __init__(self, graph: LogicalGraph) -> None:
        self._graph = graph
        self._maker: dict[str, Call] = {}
        # Tensors that need a gradient; where ways end, with the bytes of weights that keep a sum away, too.
        self._differentiable = {node.value.name for node in trained(graph)}
        self._ends = dict.fromkeys(self._differentiable, _MANY)
        self._used = set[str]()

    def over(self, call: Call, rows: Input | None, stops: bool) -> None:
        """Go over the next call of the forward.

        Args:
            call: which.
            rows: the weight, where it is the product of a layer by rows.
            stops: true if no parts go back through it: it is one of a layer by columns.
        """
        if self._differentiable.isdisjoint(call.uses):
            return
        for value in call.makes:
            self._differentiable.add(value.name)
            if rows is not None:
                self._ends[value.name] = rows.value.nbytes
            elif not stops:
                self._maker[value.name] = call

    def lead_to(self, name: str) -> bool:
        """True if a tensor needs a gradient."""
        return name in self._differentiable

    def widest(self, name: str) -> GradientPath | None:
        """The way whose smallest tensor is the largest, of those that are left; None if there is none."""
        waiting: list[tuple[int, int, tuple[str, ...]]] = [(-self._size(name), 0, (name,))]
        seen = set[str]()
        while waiting:
            width, steps, way = heappop(waiting)
            last = way[-1]
            if last in seen or last in self._used:
                continue
            seen.add(last)
            if last in self._ends:
                self._used.update(way)
                return GradientPath(Bytes(-width), self._ends[last])
            uses = self._maker[last].uses if last in self._maker else ()
            for each in self._differentiable.intersection(uses):
                heappush(waiting, (max(width, -self._size(each)), steps + 1, (*way, each)))
        return None

    def _size(self, name: str) -> int:
        return self._graph.values[name].nbytes


@final
class _Walk:
    """A walk through the forward that finds where parts of sums must have been added up."""

    def __init__(self, graph: LogicalGraph, cuts: Mapping[str, str]) -> None:
        self._graph, self._cuts = graph, cuts
        self._weights = {
            node.value.name: node for node in graph.of_kind(Input) if node.role == "parameter"
        }
        self._ways = GradientPaths(graph)
        self._seen_as: dict[str, str] = {}
        self._parts: dict[str, frozenset[str]] = {}
        self._rows: dict[str, Sum] = {}
        self._added = set[str]()
        self._read_by: dict[str, Bytes] = {}
        self.forward: list[Sum] = []

    def over(self, call: Call) -> None:
        """Go over the next call."""
        made = [value.name for value in call.makes]
        if call.op in TURNS and call.uses and call.uses[0] in self._weights:
            self._weights.update((name, self._weights[call.uses[0]]) for name in made)
        if call.op in _VIEWS and call.uses:
            whole = self._seen_as.get(call.uses[0], call.uses[0])
            self._seen_as.update((name, whole) for name in made)
        self._add_up(call, made)
        weight, cut = self._cut(call)
        self._ways.over(call, weight if cut == "rows" else None, stops=cut == "columns")
        if weight is not None and cut == "rows":
            for value in call.makes:
                once = not self._ways.lead_to(value.name)
                self._parts[value.name] = frozenset((value.name,))
                self._rows[value.name] = Sum(value.nbytes, weight.value.nbytes, once)
        elif weight is not None:
            # What a layer cut by columns reads: each rank has a part of its gradient.
            for name in call.uses:
                if self._ways.lead_to(name) and name not in self._weights:
                    whole = self._seen_as.get(name, name)
                    self._read_by[whole] = Bytes(self._read_by.get(whole, 0) + weight.value.nbytes)

    @property
    def backward(self) -> Iterator[Sum]:
        """The gradients that are added up, each on a way of its own."""
        for name, weights in self._read_by.items():
            way = self._ways.widest(name)
            if way is not None:
                yield Sum(way.size, min(weights, way.weights))

    def _add_up(self, call: Call, made: Sequence[str]) -> None:
        """Note parts that a call reads: it makes parts itself, or reads the sum."""
        before = [self._parts[name] for name in call.uses if name in self._parts]
        if before and self._passes_parts(call):
            parts = frozenset[str]().union(*before)
            self._parts.update((name, parts) for name in made)
            # Parts may be added up once a call has made fewer elements of them: a mean, a slice.
            sizes = [value.nbytes for value in call.makes if "float" in value.dtype]
            for part in parts if sizes else ():
                row = self._rows[part]
                self._rows[part] = replace(row, size=min(row.size, *sizes))
            return
        for parts in before:
            rows = [self._rows[part] for part in parts - self._added]
            if rows:
                size, weights = min(row.size for row in rows), min(row.weights for row in rows)
                self.forward.append(Sum(size, weights, any(row.once for row in rows)))
            self._added |= parts

    def _passes_parts(self, call: Call) -> bool:
        """True if a call of parts may make parts: it is linear. A layer that is cut reads the sum.

        Ops that partial sums cannot pass, such as a product of two values, count too.
        """
        if call.op in _VIEWS or not has_rule(call.op):
            return True
        if self._cut(call)[0] is not None:
            return False
        bound = call.first
        return bool(rule_of(bound).linear_groups(bound))

    def _cut(self, call: Call) -> tuple[Input | None, str]:
        """The weight of the layer that is cut whose product a call is, and how."""
        if call.op in PRODUCTS:
            for node in (self._weights[name] for name in call.uses if name in self._weights):
                cut = self._cuts.get(node.key.removesuffix(".weight"))
                if cut is not None and node.key.endswith(".weight"):
                    return node, cut
        return None, ""
