"""Linear layers that a Megatron grid cuts by columns, and those by rows, read off the captured step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from weft.ir.logical import Call, Input
from weft.planning.stored_step import StoredStep
from weft.search.steps.forward_calls import forward
from weft.search.steps.repeated import Blocks, repeated_blocks

# Products that linear layers become, and calls that only turn or cast a weight.
PRODUCTS = frozenset(("aten.mm.default", "aten.addmm.default"))
TURNS = frozenset(
    ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten._to_copy.default")
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@final
@dataclass(frozen=True)
class Linears:
    """Patterns of linear modules, cut in turn: what a layer cut by columns gives, one cut by rows adds up.

    Attributes:
        columns: whose outputs are split (Megatron-LM, arXiv 1909.08053, section 3).
        rows: whose inputs are split.
        cuts: "columns" or "rows" for each module that is cut.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cuts: Mapping[str, str]

    def __bool__(self) -> bool:
        """True where any layer is cut."""
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
    """The module of a linear layer whose product a call is."""
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
