"""Linear layers that a Megatron grid cuts by columns, and those by rows, read off the captured step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import final

from weft.ir.logical import Call, Input, LogicalGraph, Ref
from weft.ops.rules.own_ops import EXPERT_MM
from weft.planning.stored_step import StoredStep
from weft.search.steps.repeated import Blocks, repeated_blocks

# Products that linear layers become, and calls that only turn or cast a weight.
PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
TURNS = frozenset(
    ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten._to_copy.default")
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def forward(graph: LogicalGraph) -> Iterator[Call]:
    """The calls of the forward, in order."""
    return (call for call in graph.of_kind(Call) if call.phase.kind == "forward")


@final
@dataclass(frozen=True)
class Linears:
    """Patterns of linear modules, cut in turn: a layer split by columns feeds one split by rows, which needs a sum.

    Attributes:
        columns: whose outputs are split (Megatron-LM, arXiv 1909.08053, section 3).
        rows: whose inputs are split.
        cuts: "columns" or "rows" for each module that is cut.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cuts: Mapping[str, str]

    def __bool__(self) -> bool:
        """True if any layer is cut."""
        return bool(self.cuts)


def linears_of(step: StoredStep) -> Linears:
    """The layers that are cut: those of the repeated blocks, or all of a model whose blocks have none.

    A layer whose input is whole is cut by columns, one whose input is split by rows; between them whatever reads
    something split is split.
    """
    blocks = repeated_blocks(step.modules)
    return _of(step, blocks) or _of(step, None)


def _of(step: StoredStep, blocks: Blocks | None) -> Linears:
    """The layers of the blocks, or of the whole model."""
    graph = step.graph
    keys = {node.value.name: node.key for node in graph.of_kind(Input) if node.role == "parameter"}
    split: set[str] = set()
    cuts: dict[str, str] = {}
    for call in forward(graph):
        if call.op in TURNS and call.uses and call.uses[0] in keys:
            keys.update((value.name, keys[call.uses[0]]) for value in call.makes)
            continue
        module = _linear(call, keys, blocks)
        read = any(name in split for name in call.uses if name not in keys)
        if module is None:
            split.update(value.name for value in call.makes if read)
            continue
        cuts[module] = "rows" if read else "columns"
        if not read:
            split.update(value.name for value in call.makes)
    columns = [module for module, cut in cuts.items() if cut == "columns"]
    rows = [module for module, cut in cuts.items() if cut == "rows"]
    return Linears(_patterns(columns, rows), _patterns(rows, columns), cuts)


def _linear(call: Call, keys: dict[str, str], blocks: Blocks | None) -> str | None:
    if call.op not in PRODUCTS:
        return None
    weights = [keys[name] for name in call.uses if keys.get(name, "").endswith(".weight")]
    if len(weights) != 1 or (blocks is not None and blocks.of(weights[0]) is None):
        return None
    return weights[0].removesuffix(".weight")


def _patterns(modules: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Patterns that stand for these modules and none of the others: a star for the number of a block."""
    taken = {_NUMBER.sub("*", module) for module in others}
    starred = ((module, _NUMBER.sub("*", module)) for module in modules)
    return tuple(
        dict.fromkeys(module if pattern in taken else pattern for module, pattern in starred)
    )


# Calls that read a table of biases, or numbers, at the experts of rows.
_INDEX = "aten.index.Tensor"


@final
@dataclass(frozen=True)
class Experts:
    """The experts of a model.

    Attributes:
        parameters: that hold all experts of a mixture, in their first dimension.
        count: what the numbers of experts of all mixtures are multiples of; 0 if there are none.
    """

    parameters: tuple[str, ...]
    count: int


def experts_of(graph: LogicalGraph) -> Experts:
    """The experts of a step's mixtures: their matrices, and tables of biases that are read where these are."""
    found: dict[str, int] = {}
    for call in graph.of_kind(Call):
        if call.op != EXPERT_MM:
            continue
        weight = parameter_of(graph, call.args[1])
        if weight is not None:
            found[weight.key] = weight.value.shape[0]
            found |= _tables(graph, call.args[2], weight.value.shape[0])
    return Experts(tuple(found), gcd(*found.values()) if found else 0)


def _tables(graph: LogicalGraph, ids: object, experts: int) -> Iterator[tuple[str, int]]:
    """Tables of as many rows that are read at the experts of rows."""
    readers = graph.users[ids.name] if isinstance(ids, Ref) else ()
    for node in readers:
        if isinstance(node, Call) and node.op == _INDEX:
            table = parameter_of(graph, node.args[0])
            if table is not None and table.value.shape[0] == experts:
                yield table.key, experts


# Parameters with a row for each word or class, read off the captured step: tables, and the layer after a loss.
#
# Each may be split by rows over the ranks that split the batch: rows need no gradient added up then, and only rows that
# are looked up, or sums over classes, are sent (OneFlow, arXiv 2110.15032, section 6: Wide & Deep, InsightFace).


_LOOKED_UP = frozenset(("aten.embedding.default", "aten._embedding_bag.default"))
_LOSS = "aten._log_softmax.default"
# Calls between a layer and its loss that keep classes apart: another shape or dtype, and a bias that is added.
_BETWEEN = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "_to_copy.default"),
        *("unsqueeze.default", "squeeze.dim", "add.Tensor", "slice.Tensor"),
    )
)


def vocabularies(graph: LogicalGraph) -> tuple[str, ...]:
    """The keys of parameters whose first dimension is of words or classes."""
    found: dict[str, None] = {}
    for call in forward(graph):
        if call.op in _LOOKED_UP:
            found |= dict.fromkeys(_parameters(graph, call.args[:1]))
        elif call.op == _LOSS:
            found |= dict.fromkeys(_behind(graph, call.args[0]))
    return tuple(found)


def _behind(graph: LogicalGraph, at: object) -> Iterator[str]:
    """The parameters of the layer that makes a value, through calls between."""
    while isinstance(at, Ref) and isinstance(maker := graph.producers[at.name], Call):
        if maker.op in PRODUCTS:
            yield from _parameters(graph, maker.args)
            return
        if maker.op not in _BETWEEN:
            return
        yield from _parameters(graph, maker.args[1:])
        at = maker.args[0]


def _parameters(graph: LogicalGraph, arguments: tuple[object, ...]) -> Iterator[str]:
    for at in arguments:
        node = parameter_of(graph, at)
        if node is not None:
            yield node.key


def parameter_of(graph: LogicalGraph, at: object) -> Input | None:
    """The parameter that an argument is, turned or cast; None if it is not a parameter."""
    while isinstance(at, Ref):
        maker = graph.producers[at.name]
        if isinstance(maker, Input):
            return maker if maker.role == "parameter" and maker.value.shape else None
        if not isinstance(maker, Call) or maker.op not in TURNS:
            return None
        at = maker.args[0]
    return None
