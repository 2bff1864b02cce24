"""Offload: activations that chosen modules keep for the backward stay in host memory.

Before: backward calls read what forward calls have made. After: each such value is copied by
`weft.offload` when it is made; right before the first backward call that reads it stands a
`weft.load`, which waits for the gradient that this call reads. In between the value takes no device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from weft.compiler.context import Context
from weft.ir.alias import variable_views, view_bases
from weft.ir.arguments import with_names
from weft.ir.logical import FORWARD, Call, Phase
from weft.ir.plan import (
    Exchange,
    LocalCall,
    LocalNode,
    LocalOutput,
    LocalProgram,
    LocalUpdate,
    LocalValue,
)
from weft.ops.call import Token
from weft.patterns import check_named, covers

OFFLOAD, LOAD = "weft.offload", "weft.load"
# Smaller tensors stay: moving them costs more than it frees.
SMALLEST = 1024


def offload(program: LocalProgram, context: Context) -> LocalProgram:
    """Keep activations of the modules that `Options.offload` names in host memory until the backward.

    Values of less than 1 KiB stay, and so do those that share memory with variables, with the
    batch, or with what the step returns; and what is made once a step and read for each micro-batch.

    Args:
        context: with the patterns of module paths; what is below a module belongs to it. And with the graph
            that the program was made from.

    Raises:
        StrategyError: when a pattern names no module.
    """
    graph, patterns = context.graph, context.options.offload
    if not patterns:
        return program
    assert graph is not None  # programs are made of it
    # The module in whose forward each value is made.
    modules = {
        value.name: call.location.module
        for call in graph.of_kind(Call)
        if call.phase.kind == "forward" and call.location is not None
        for value in call.makes
    }
    known = {*modules.values(), *context.options.modules}
    for pattern in patterns:
        check_named(f"offload=[{pattern!r}]", pattern, known, "modules", covers)
    named = {name for name, path in modules.items() if any(covers(one, path) for one in patterns)}
    first = {
        value.name: place
        for value, place in _kept(program)
        if value.name in named
        and value.nbytes >= SMALLEST
        # What is made once a step stays where the first that reads it in the backward does so for each micro-batch:
        # it would be loaded before all of them, as soon as it was sent away.
        and (
            value.name in program.loop
            or program.loop.isdisjoint(each.name for each in program.nodes[place].makes)
        )
    }
    looped = first.keys() & program.loop
    new = {f"{name}.{end}" for name in looped for end in ("host", "back")}
    copies = {f"{name}.{end}": name for name in first for end in ("host", "back")}
    device = Token("device", graph.placements[0].device_type)
    nodes = tuple(_nodes(program, first, device))
    origins = {**program.origins, **copies}
    return replace(program, nodes=nodes, loop=program.loop | new, origins=origins)


def _kept(program: LocalProgram) -> Iterator[tuple[LocalValue, int]]:
    """Values that forward calls make and backward nodes read, with the place of the first that does."""
    bases = view_bases(program.nodes)
    first: dict[str, int] = {}
    staying = {output.name for output in program.outputs}
    for place, node in enumerate(program.nodes):
        if isinstance(node, LocalUpdate):
            staying |= node.reads
        elif node.phase.kind != "forward":
            first.update((name, place) for name in node.reads if name not in first)
    staying = {bases.get(name, name) for name in staying} | {i.value.name for i in program.inputs}
    for node in program.nodes:
        if isinstance(node, LocalCall) and node.phase.kind == "forward":
            for value in node.makes:
                if value.name in first and bases.get(value.name, value.name) not in staying:
                    yield value, first[value.name]


def _nodes(program: LocalProgram, first: Mapping[str, int], device: Token) -> Iterator[LocalNode]:
    due: dict[int, list[str]] = {}
    for name, place in first.items():
        due.setdefault(place, []).append(name)
    for place, node in enumerate(program.nodes):
        for name in due.get(place, ()):
            value = program.values[name]
            awaited = _awaited(program, place, name in program.loop)
            gradient = (program.values[awaited].ref,) if awaited else ()
            args = (replace(value, name=f"{name}.host").ref, device, *gradient)
            yield LocalCall.of(LOAD, args, (replace(value, name=f"{name}.back"),), node.phase)
        back = {name: f"{name}.back" for name in node.reads if first.get(name, place + 1) <= place}
        if isinstance(node, LocalCall) and back:
            node = with_names(node, back)
        elif isinstance(node, Exchange) and node.input is not None and back:
            node = replace(node, input=replace(node.input, name=back[node.input.name]))
        yield node
        for value in node.makes:
            if value.name in first:
                host = replace(value, name=f"{value.name}.host")
                yield LocalCall.of(OFFLOAD, (value.ref,), (host,), node.phase)


def _awaited(program: LocalProgram, place: int, looped: bool) -> str | None:
    """The gradient that the node at `place` reads, or else one that nodes after it do.

    A load that runs once a step (not `looped`) cannot wait for values that each micro-batch makes.
    """
    made = {
        value.name: number
        for number, node in enumerate(program.nodes[:place])
        if node.phase.kind != "forward"
        for value in node.makes
        if looped or value.name not in program.loop
    }
    for node in program.nodes[place:]:
        known = [name for name in sorted(node.reads) if name in made]
        if known and node.phase == program.nodes[place].phase:
            return max(known, key=made.__getitem__)
    return None


# Views of variables: they share the memory that an update overwrites.
#
# Within the compute queue, whoever reads a view is entered as a reader of the variable itself. A
# collective, or a result that the caller keeps, works on a copy instead.
#
# Before: a `LocalProgram`, in which collectives and outputs read views of variables. After: they read clones of these.


def copy_escaping_views(program: LocalProgram, _: Context) -> LocalProgram:
    """Copy views of variables where they leave the compute queue: into a collective, or to the caller."""
    bases = variable_views(program)
    nodes: list[LocalNode] = []
    loop, origins = program.loop, dict(program.origins)
    for node in program.nodes:
        if (
            isinstance(node, Exchange)
            and node.input is not None
            and bases.get(node.input.name, node.input.name) != node.input.name
        ):
            made = node.output.name if node.output else f"{node.input.name}.{len(nodes)}"
            copy = replace(node.input, name=f"{made}.copy")
            nodes.append(_clone(node.input, copy, node.phase))
            origins[copy.name] = node.input.name
            loop |= {copy.name} if node.input.name in program.loop else set()
            node = replace(node, input=copy)
        nodes.append(node)
    values = program.values
    outputs = []
    for number, output in enumerate(program.outputs):
        if output.name in bases:
            copy = replace(values[output.name], name=f"{output.name}.out{number}")
            nodes.append(_clone(values[output.name], copy, FORWARD))
            origins[copy.name] = output.name
            output = LocalOutput(copy.name, output.key)
        outputs.append(output)
    if len(nodes) == len(program.nodes):  # nothing is copied
        return program
    kept = tuple(outputs)
    return replace(program, nodes=tuple(nodes), outputs=kept, loop=loop, origins=origins)


def _clone(value: LocalValue, copy: LocalValue, phase: Phase) -> LocalCall:
    return LocalCall.of("aten.clone.default", (value.ref,), (copy,), phase)
