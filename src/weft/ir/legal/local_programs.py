"""Rules of a legal local program; the table of them is in `weft.ir.legal.tables`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from weft.ir.forms import local_text, part_text
from weft.ir.nodes import OVER_STEP, VARIABLE_ROLES
from weft.ir.plan import Exchange, LocalCall, LocalProgram, LocalUpdate
from weft.units import ITEM_SIZE

# The update that a buffer gets, of which each micro-batch makes a version.
COPY = "copy"

# A rule yields (line of text, what is wrong) for each place where it does not hold.
LocalFinding = tuple[str, str]


def local_values_assigned_once(program: LocalProgram) -> Iterator[LocalFinding]:
    """No two inputs or nodes make a value of the same name."""
    made = len(program.inputs) + sum(len(node.makes) for node in program.nodes)
    if made == len(program.values):
        return
    seen = Counter(item.value.name for item in program.inputs)
    for node in program.nodes:
        seen.update(value.name for value in node.makes)
        for value in node.makes:
            if seen[value.name] > 1:
                yield local_text(node), f"%{value.name} is assigned twice"
    for item in program.inputs:
        if seen[item.value.name] > 1:
            yield part_text(item), f"%{item.value.name} is assigned twice"


def local_values_made_before_use(program: LocalProgram) -> Iterator[LocalFinding]:
    """A node reads only inputs and what an earlier node made; what is returned is there at the end."""
    there = {item.value.name for item in program.inputs}
    for node in program.nodes:
        if not node.reads <= there:
            yield local_text(node), f"{_names(node.reads - there)} is not made before"
        there.update([value.name for value in node.makes])
    for output in program.outputs:
        if output.name not in there:
            yield part_text(output), f"%{output.name} is not made"


def local_calls_know_their_tensors(program: LocalProgram) -> Iterator[LocalFinding]:
    """The `OpCall` of a call has the shapes and dtypes of the local values that it reads and makes."""
    values = program.values
    for node in program.nodes:
        if not isinstance(node, LocalCall):
            continue
        if node.call.operands != tuple([values[name].spec for name in node.operands]):
            yield local_text(node), "its operands have other shapes or dtypes"
        if node.call.results != tuple([value and value.spec for value in node.outputs]):
            yield local_text(node), "its results have other shapes or dtypes"


def local_dtypes_known(program: LocalProgram) -> Iterator[LocalFinding]:
    """Every dtype is in `weft.units.ITEM_SIZE`; no size is negative."""
    for value in program.values.values():
        if value.dtype not in ITEM_SIZE:
            yield f"%{value.name}", f"dtype {value.dtype!r} is unknown"
        if value.shape and min(value.shape) < 0:
            yield f"%{value.name}", f"shape {value.shape} has a negative size"


def local_keys_unique(program: LocalProgram) -> Iterator[LocalFinding]:
    """No two inputs share role and key; no two outputs share a key."""
    inputs = Counter((item.role, item.key) for item in program.inputs)
    for item in program.inputs:
        if inputs[item.role, item.key] > 1:
            yield part_text(item), f"the key {item.key!r} stands twice"
    outputs = Counter(output.key for output in program.outputs)
    for output in program.outputs:
        if outputs[output.key] > 1:
            yield part_text(output), f"the key {output.key!r} stands twice"


def exchanges_take_what_is_there(program: LocalProgram) -> Iterator[LocalFinding]:
    """The tensor that goes into an exchange has the shape and the dtype in which it was made."""
    values = program.values
    for node in program.nodes:
        taken = node.input if isinstance(node, Exchange) else None
        if taken is not None and taken != values.get(taken.name):
            yield local_text(node), f"%{taken.name} has another shape or dtype"


def local_updates_write_variables(program: LocalProgram) -> Iterator[LocalFinding]:
    """An update's target and states are variables, each written once; its source has the target's shape."""
    variables = {item.value.name for item in program.inputs if item.role in VARIABLE_ROLES}
    written: set[str] = set()
    for node in program.nodes:
        if not isinstance(node, LocalUpdate):
            continue
        names = {node.target, *node.states}
        if not names <= variables:
            yield local_text(node), f"{_names(names - variables)} is not a variable"
        if names & written:
            yield local_text(node), f"{_names(names & written)} is updated twice"
        written |= names
        if program.values[node.source].shape != program.values[node.target].shape:
            yield local_text(node), "source and target differ in shape"


def loop_complete(program: LocalProgram) -> Iterator[LocalFinding]:
    """A node that reads values of the loop, or has arguments that vary, makes such values, unless it makes one of all.

    A call that reads none may make them too: a parameter is gathered for each micro-batch. Optimizers and
    the caller get what is made once a step; buffers, a version from each micro-batch.
    """
    loop = program.loop
    for name in sorted(loop - program.values.keys()):
        yield f"%{name}", "it is in the loop, but nowhere made"
    for node in program.nodes if program.micro_batches > 1 else ():
        over = isinstance(node, LocalCall) and node.op in OVER_STEP
        varies = isinstance(node, LocalCall) and bool(node.varyings)
        for value in node.makes if over or varies or not loop.isdisjoint(node.reads) else ():
            if (value.name in loop) == over:
                found = "in the loop" if over else "not in the loop"
                yield local_text(node), f"%{value.name} is {found}"
        if isinstance(node, LocalUpdate) and node.rule != COPY and node.source in loop:
            yield local_text(node), f"%{node.source} is in the loop"
    for output in program.outputs:
        if output.name in loop:
            yield part_text(output), f"%{output.name} is in the loop"


def forms_are_made(program: LocalProgram) -> Iterator[LocalFinding]:
    """A value that is a form of another has one that is there, and is not a form of itself."""
    for name in program.origins:
        seen, origin = {name}, program.origins[name]
        while origin in program.origins and origin not in seen:
            seen.add(origin)
            origin = program.origins[origin]
        if origin in seen:
            yield f"form %{name} of %{program.origins[name]}", f"%{name} is a form of itself"
        if name not in program.values:
            yield f"form %{name} of %{program.origins[name]}", f"%{name} is nowhere made"


def local_arguments_complete(program: LocalProgram) -> Iterator[LocalFinding]:
    """An argument that varies has a value for each micro-batch."""
    if program.micro_batches < 1:
        yield f"rank {program.rank}", f"it has {program.micro_batches} micro-batches"
    for node in program.nodes:
        for varying in node.varyings if isinstance(node, LocalCall) else ():
            if len(varying.values) != program.micro_batches:
                yield (
                    local_text(node),
                    f"{varying} has no value for each of {program.micro_batches} micro-batches",
                )


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(f"%{name}" for name in sorted(names))
