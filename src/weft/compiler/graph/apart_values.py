"""Values that are there apart beside merged ones, and the calls that make them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.graph.merged_calls import filled_apart
from weft.compiler.graph.merged_dims import Merged
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, node_uses, refs
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise


@final
@dataclass(frozen=True)
class ApartValues:
    """Finds values apart, and writes calls that make them so.

    Attributes:
        graph: as it was.
        nodes: what is written so far.
        known: of what is there apart, that value, and what is merged.
    """

    graph: LogicalGraph
    nodes: list[Node] = field(default_factory=list)
    known: dict[str, tuple[Value, Merged]] = field(default_factory=dict)

    def is_apart(self, name: str, merged: Merged) -> bool:
        """True where a value may be read apart; values made of nothing are made apart."""
        if name in self.known:
            return self.known[name][1] == merged
        value, maker = self.graph.values[name], self.graph.producers[name]
        if merged.stretches(value.shape):
            return True
        if not isinstance(maker, Call) or any(list(refs(arg)) for _, arg in maker.kwargs):
            return False
        args = filled_apart(self.graph, maker, merged.apart(value.shape), merged)
        cares = factors_of(maker.op) is not pointwise
        if args is None and not cares and all(self.is_apart(x, merged) for x in node_uses(maker)):
            args = self.args_apart(maker.args)
        if args is None:
            return False
        there = self.write(maker, maker.op, args, value, merged.apart(value.shape), maker.kwargs)
        self.known[name] = there, merged
        return True

    def args_apart(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Arguments with values that are apart in place of merged ones."""

        def there(arg: Arg) -> Arg:
            known = self.known.get(arg.name) if isinstance(arg, Ref) else None
            return Ref(known[0].name) if known else arg

        return tuple(map(there, args))

    def write(
        self,
        node: Call,
        op: str,
        args: tuple[Arg, ...],
        of: Value,
        shape: tuple[int, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        """Write a call where `node` stands, that makes `of` in another shape."""
        made = Value(f"{of.name}.apart{len(self.nodes)}", shape, of.dtype)
        self.nodes.append(replace(node, op=op, args=args, kwargs=kwargs, outputs=(made,)))
        return made
