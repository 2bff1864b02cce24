"""Views of variables: they share the memory that an update overwrites.

Within the compute queue, whoever reads a view is entered as a reader of the variable itself. A
collective, or a result that the caller keeps, works on a copy instead.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.logical import FORWARD, Phase, Ref
from weft.ir.plan import (
    Exchange,
    LocalCall,
    LocalNode,
    LocalOutput,
    LocalProgram,
    LocalValue,
)

# Ops whose results may share memory with their first operand.
VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "_conj.default",
        "_neg_view.default",
        "_reshape_alias.default",
        "_unsafe_view.default",
        "alias.default",
        "as_strided.default",
        "broadcast_to.default",
        "chunk.default",
        "conj_physical.default",
        "contiguous.default",
        "detach.default",
        "diagonal.default",
        "expand.default",
        "expand_as.default",
        "flatten.using_ints",
        "lift_fresh.default",
        "movedim.intlist",
        "narrow.default",
        "numpy_T.default",
        "permute.default",
        "positive.default",
        "reshape.default",
        "select.int",
        "slice.Tensor",
        "split.Tensor",
        "split_with_sizes.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "swapaxes.default",
        "t.default",
        "transpose.int",
        "unbind.int",
        "unflatten.int",
        "unfold.default",
        "unsafe_chunk.default",
        "unsafe_split.Tensor",
        "unsafe_split_with_sizes.default",
        "unsqueeze.default",
        "view.default",
        "view.dtype",
        "view_as.default",
        "view_as_complex.default",
        "view_as_real.default",
    )
) | frozenset(
    f"weft.{name}" for name in ("slice", "keep", "hint", "checked", "required", "after", "use")
)


def variable_views(program: LocalProgram) -> dict[str, str]:
    """For each value that may share memory with a variable or constant: the name of that input; inputs included."""
    bases = {item.value.name: item.value.name for item in program.inputs if item.role != "batch"}
    for node in program.nodes:
        if isinstance(node, LocalCall) and node.op in VIEW_OPS:
            first = next(iter(node.uses), "")
            if first in bases:
                bases.update((value.name, bases[first]) for value in node.makes)
    return bases


def copy_escaping_views(program: LocalProgram) -> LocalProgram:
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
            nodes.append(_clone(node.input.name, copy, node.phase))
            origins[copy.name] = node.input.name
            loop |= {copy.name} if node.input.name in program.loop else set()
            node = replace(node, input=copy)
        nodes.append(node)
    values = program.values
    outputs = []
    for number, output in enumerate(program.outputs):
        if output.name in bases:
            copy = replace(values[output.name], name=f"{output.name}.out{number}")
            nodes.append(_clone(output.name, copy, FORWARD))
            origins[copy.name] = output.name
            output = LocalOutput(copy.name, output.key)
        outputs.append(output)
    if len(nodes) == len(program.nodes):  # nothing is copied
        return program
    kept = tuple(outputs)
    return replace(program, nodes=tuple(nodes), outputs=kept, loop=loop, origins=origins)


def _clone(name: str, copy: LocalValue, phase: Phase) -> LocalCall:
    return LocalCall("aten.clone.default", (Ref(name),), (), (copy,), phase)
