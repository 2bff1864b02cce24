"""Views of variables: they share the memory that an update overwrites.

Within the compute queue, whoever reads a view is entered as a reader of the variable itself. A
collective, or a result that the caller keeps, works on a copy instead.

Before: a `LocalProgram`, in which collectives and outputs read views of variables. After: they read clones of these.
"""

from __future__ import annotations

from dataclasses import replace

from weft.compiler.context import Context
from weft.ir.alias import variable_views
from weft.ir.logical import FORWARD, Phase
from weft.ir.plan import (
    Exchange,
    LocalCall,
    LocalNode,
    LocalOutput,
    LocalProgram,
    LocalValue,
)


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
