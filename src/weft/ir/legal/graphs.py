"""Rules of a legal logical graph; the table of them is in `weft.ir.legal.tables`."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import LayoutError
from weft.ir.logical import (
    VARIABLE_ROLES,
    Box,
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Update,
    Value,
    refs,
)
from weft.ir.nodes import HINT, TAKE
from weft.ops.rule import kept_readers
from weft.units import ITEM_SIZE

# (node, what is wrong)
Finding = tuple[Node, str]

# Ops that hand on what they read.
_PASSING = ("weft.after",)

# Inputs first, then what computes, then updates, then outputs.
_ORDER = {Input: 0, Call: 1, Box: 1, Update: 2, Output: 3}


def kinds_in_order(graph: LogicalGraph) -> Iterator[Finding]:
    """Inputs are first, then calls and boxings, then updates, then outputs."""
    reached = 0
    for node in graph.nodes:
        if _ORDER[type(node)] < reached:
            yield node, "it is after a node of a later kind"
        reached = max(reached, _ORDER[type(node)])


def values_assigned_once(graph: LogicalGraph) -> Iterator[Finding]:
    """No two nodes make a value of the same name."""
    if sum([len(node.makes) for node in graph.nodes]) == len(graph.values):
        return
    seen: set[str] = set()
    for node in graph.nodes:
        for value in node.makes:
            if value.name in seen:
                yield node, f"%{value.name} is assigned twice"
            seen.add(value.name)


def values_made_before_use(graph: LogicalGraph) -> Iterator[Finding]:
    """A node reads only values that an earlier node made."""
    seen: set[str] = set()
    for node in graph.nodes:
        if not seen.issuperset(node.uses):
            for name in node.uses:
                if name not in seen:
                    yield node, f"%{name} is not made before"
        seen.update([value.name for value in node.makes])


def calls_know_their_tensors(graph: LogicalGraph) -> Iterator[Finding]:
    """The `OpCall` of a call has the shapes and dtypes of the values that it reads and makes."""
    values = graph.values
    for node in graph.of_kind(Call):
        call = node.call
        if call.operands != tuple([values[name].spec for name in node.operands]):
            yield node, "its operands have other shapes or dtypes"
        if call.results != tuple([value and value.spec for value in node.outputs]):
            yield node, "its results have other shapes or dtypes"


def dtypes_known(graph: LogicalGraph) -> Iterator[Finding]:
    """Every dtype is in `weft.units.ITEM_SIZE`; no size is negative."""
    # For equal ones, such as those of repeated layers, one.
    kinds = {(value.dtype, value.shape) for value in graph.values.values()}
    if all(dtype in ITEM_SIZE and min(shape, default=0) >= 0 for dtype, shape in kinds):
        return
    for node, value in _made(graph):
        if value.dtype not in ITEM_SIZE:
            yield node, f"dtype {value.dtype!r} is unknown"
        if value.shape and min(value.shape) < 0:
            yield node, f"shape {value.shape} has a negative size"


def keys_unique(graph: LogicalGraph) -> Iterator[Finding]:
    """No two inputs share role and key, except entries of the batch and constants on other ranks; no two outputs do."""
    seen: set[tuple[str, str, int]] = set()
    for node in graph.nodes:
        if not isinstance(node, Input | Output):
            continue
        role = node.role if isinstance(node, Input) else "output"
        entries = {(role, node.key, rank) for rank in _leaf_ranks(node)}
        if seen & entries:
            yield node, f"the key {node.key!r} stands twice"
        seen |= entries


def _leaf_ranks(node: Input | Output) -> tuple[int, ...]:
    """The ranks of an entry of the batch or a constant, once it has a layout; else one that stands for all."""
    if isinstance(node, Output) or node.role in VARIABLE_ROLES or node.value.layout is None:
        return (-1,)
    return node.value.layout.placement.ranks


def updates_write_variables(graph: LogicalGraph) -> Iterator[Finding]:
    """An update's target and states are variables, each written once; its source has the target's shape."""
    inputs = (node for node in graph.of_kind(Input) if node.role in VARIABLE_ROLES)
    variables = {node.value.name for node in inputs}
    written: set[str] = set()
    for node in graph.of_kind(Update):
        for ref in (node.target, *node.states):
            if ref.name not in variables:
                yield node, f"%{ref.name} is not a variable"
            if ref.name in written:
                yield node, f"%{ref.name} is updated twice"
            written.add(ref.name)
        if graph.values[node.target.name].shape != graph.values[node.source.name].shape:
            yield node, "source and target differ in shape"


def shares_fit(graph: LogicalGraph) -> Iterator[Finding]:
    """Only variables are stored in shares, of a dimension that they have."""
    for node in graph.of_kind(Input):
        shares, shape = node.shares, node.value.shape
        if shares is None:
            continue
        if node.role not in VARIABLE_ROLES:
            yield node, "it is not a variable, but stored in shares"
        if shape[shares.dim : shares.dim + 1] != (shares.size,):
            yield node, f"{shares} do not fit the shape {list(shape)}"


def boxing_keeps_the_tensor(graph: LogicalGraph) -> Iterator[Finding]:
    """A boxing changes the layout, never shape or dtype."""
    for node in graph.of_kind(Box):
        source = graph.values[node.input.name]
        if (source.shape, source.dtype) != (node.output.shape, node.output.dtype):
            yield node, "shape or dtype changes"


def varying_arguments_complete(graph: LogicalGraph) -> Iterator[Finding]:
    """An argument that varies has a value for each micro-batch, and no value of the graph in it."""
    if graph.micro_batches < 1:
        yield graph.nodes[0], f"the graph has {graph.micro_batches} micro-batches"
    for node in graph.of_kind(Call):
        for varying in node.varyings:
            if len(varying.values) != graph.micro_batches:
                yield (
                    node,
                    f"{varying} has no value for each of {graph.micro_batches} micro-batches",
                )
            if any(refs(varying.values)):
                yield node, f"{varying} holds values of the graph"


def inputs_come_as_said(graph: LogicalGraph) -> Iterator[Finding]:
    """A leaf that is cut has the micro-batches first; what other stages send for each is not a variable."""
    for node in graph.of_kind(Input):
        if node.cut and (node.role, *node.value.shape[:1]) != ("batch", graph.micro_batches):
            yield node, f"it is not a leaf of the batch in {graph.micro_batches} micro-batches"
        if node.sent == "each" and node.role in VARIABLE_ROLES:
            yield node, "a variable comes once a step"


def hints_given(graph: LogicalGraph) -> Iterator[Finding]:
    """Hints and takes say how their result is to be laid out, other calls do not."""
    for node in graph.of_kind(Call):
        if (node.hint is not None) != (node.op in (HINT, TAKE)):
            yield (
                node,
                "it says how its result is to be laid out" if node.hint else "it has no hint",
            )


def kept_values_stay(graph: LogicalGraph) -> Iterator[tuple[Node, str]]:
    """A value that only the backward of its maker understands is read by nothing else."""
    kept = graph.kept_values
    for node in graph.nodes if kept else ():
        for name in kept.intersection(node.uses):
            maker = graph.producers[name]
            assert isinstance(maker, Call)
            known = (*kept_readers(maker.op), *_PASSING)
            if not isinstance(node, Call) or node.op not in known:
                problem = f"%{name} of {maker.op} at {maker.location} is read; expected its backward alone"
                yield node, f"{problem}, in the layout in which it was made"


def layouts_given(graph: LogicalGraph) -> Iterator[Finding]:
    """Every value has a layout that fits its shape and dtype."""
    for node, value in _made(graph):
        if value.layout is None:
            yield node, f"%{value.name} has no layout"
            continue
        try:
            value.layout.check(value.shape)
            value.layout.check_dtype(value.dtype)
        except LayoutError as error:
            yield node, str(error)


def updates_in_place(graph: LogicalGraph) -> Iterator[Finding]:
    """The source of an update is laid out as its target is."""
    for node in graph.of_kind(Update):
        if graph.values[node.source.name].layout != graph.values[node.target.name].layout:
            yield node, "source and target differ in layout"


def _made(graph: LogicalGraph) -> Iterator[tuple[Node, Value]]:
    return ((node, value) for node in graph.nodes for value in node.makes)
