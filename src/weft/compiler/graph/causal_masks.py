"""Attention masks that are provably causal become the kernel's `is_causal` flag.

A model that is captured cannot look whether its mask is the plain causal one, as it does when it runs
alone, and keeps a tensor of (queries, keys) for each layer: at 32,768 tokens 4 GB a layer, under twice
the work. If the graph alone tells what the mask is (`compiler/graph/constant_folding`), and it is causal,
the kernel is told so; where it keeps everything, it goes. All other masks stay as they are: those of
padding or packed sequences in the batch, sliding windows below the length, prefixes.

Before: a graph as captured, whose attention reads a mask. After: an equal one, whose attention has the flag, or
no mask, where that is proved; calls that only made the mask are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from weft.compiler.context import Context
from weft.compiler.graph.constant_folding.folded_calls import fold_constants
from weft.compiler.graph.constant_folding.folded_values import (
    Along,
    Known,
    Scalar,
    kept_keys,
    value_of,
)
from weft.compiler.graph.rewriting import needed
from weft.ir.logical import Call, LogicalGraph, Node, Ref

# A mask value at or below these drops its key: -inf, and the least numbers of float32 and
# bfloat16, which no score outweighs.
_DROPPED = -3.3e38


@final
@dataclass(frozen=True)
class _Form:
    """At which positions an op has its query and its flag; masks stand by name."""

    query: int
    causal: int


_FORMS = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _Form(0, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _Form(1, 7),
}


def causal_masks(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph with `is_causal` in place of masks that are causal, and without masks that keep all."""
    masked = (node for node in graph.nodes if isinstance(node, Call) and node.op in _FORMS)
    if all(_mask(call) is None for call in masked):
        return graph
    known = fold_constants(graph)
    nodes = tuple(_told(node, graph, known) for node in graph.nodes)
    return graph if nodes == graph.nodes else needed(replace(graph, nodes=nodes))


def _mask(call: Call) -> Ref | None:
    """The mask of an attention; None if it has none, or names arguments that stand by position here."""
    if not {name for name, _ in call.kwargs} <= {"attn_mask", "scale"}:
        return None
    found = dict(call.kwargs).get("attn_mask")
    return found if isinstance(found, Ref) else None


def _told(node: Node, graph: LogicalGraph, known: Mapping[str, Known]) -> Node:
    if not isinstance(node, Call) or node.op not in _FORMS or (mask := _mask(node)) is None:
        return node
    form = _FORMS[node.op]
    query, key = node.args[form.query : form.query + 2]
    assert isinstance(query, Ref)
    assert isinstance(key, Ref)
    queries, keys = graph.values[query.name].shape[-2], graph.values[key.name].shape[-2]
    causal = len(node.args) > form.causal and node.args[form.causal] is True
    if mask.name not in known:
        return node
    if _keeps_all(known[mask.name]):
        return _without_mask(node, form, causal)
    values = known[mask.name]
    kept = None if isinstance(values, Along) else kept_keys(values, _kept)
    if not causal and queries == keys and kept is not None and not kept[0].any():
        # Query `q` keeps just the keys `[0, q]`.
        causal = np.array_equal(kept[1], np.arange(1, queries + 1))
        return _without_mask(node, form, True) if causal else node
    return node


def _without_mask(call: Call, form: _Form, causal: bool) -> Call:
    args = list(call.args)
    args += [0.0] * (form.causal - len(args))  # forward ops may lack their dropout, and their flag
    args[form.causal : form.causal + 1] = [causal]
    kwargs = tuple((name, value) for name, value in call.kwargs if name != "attn_mask")
    return call.changed(args=tuple(args), kwargs=kwargs)


def _keeps_all(mask: Known) -> bool:
    if isinstance(mask, Along):
        value = value_of(mask)
        return value is not None and _kept(value) is True
    keys = kept_keys(mask, _kept)
    return keys is not None and not keys[0].any() and bool((keys[1] == mask.keys).all())


def _kept(element: Scalar) -> bool | None:
    """True if an element of a mask keeps its key; None if it only makes the key weigh more or less."""
    if isinstance(element, bool):
        return element
    if element == 0:
        return True
    return False if element <= _DROPPED else None
