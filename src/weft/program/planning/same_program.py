"""Differences where processes compile different programs: of the step, of its graph, or of how it lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from weft.capture.batch import TensorLeaf, describe_batch
from weft.capture.tree import Static
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir.logical import Call, Input, LogicalGraph, Node, Output, Update
from weft.program.agreement import LEAF, gathered
from weft.program.feeding.feed import StandIns
from weft.program.planning.step import Step
from weft.runtime.world.world import World

_BATCH = "the batch "
_SAME_ROWS = 'give batches of the same shapes and dtypes, with batch="local" as many rows'
# What is compared, and where it is in the user's code.
_Line: TypeAlias = tuple[str, str]


def asked_by(step: Step) -> dict[str, str]:
    """Parameters, buffers, groups, options and leaves of the batch of a step, as `check_alike` takes them."""
    facts = dict(fact.split(": ", 1) for fact in step.facts())
    batch = StandIns(step.example_batch).whole()
    leaves = {f"{LEAF}{leaf.key}": _kind(leaf) for leaf in describe_batch(batch).leaves}
    return {**facts, **leaves}


def _kind(leaf: TensorLeaf | Static) -> str:
    """A leaf of the example in words; texts and lists, which a step need not read, by their type."""
    if isinstance(leaf, Static) and isinstance(leaf.value, str | bytes | list | tuple | dict):
        return f"a {type(leaf.value).__name__}"
    return str(leaf)


def check_same_program(world: World, compiled: Compiled) -> None:
    """Check that all processes have compiled the same program. Every process must call it.

    Raises:
        UserError: on all, names the first node in which two of them differ.
    """
    if not world.several:
        return
    if len({*gathered(world, "the program", lambda: compiled.fingerprint)}) == 1:
        return
    own = json.dumps([list(_nodes(compiled.graph)), list(_layouts(compiled.graph))])
    first, *others = map(json.loads, gathered(world, "nodes and layouts", lambda: own))
    for rank, other in enumerate(others, 1):
        for kind, one, two in zip(("the step has", "it lies as"), first, other, strict=True):
            _check_lines(kind, one, two, rank)
    raise UserError(
        "the ranks compile different programs, of the same step in the same layouts; every process must run the same "
        "versions of weft and torch, with the same variables of the environment"
    )


def _check_lines(kind: str, first: Sequence[_Line], other: Sequence[_Line], rank: int) -> None:
    for (one, here), (two, there) in zip_longest(first, other, fillvalue=("nothing more", "")):
        if one != two:
            of_batch = one.startswith(_BATCH) and two.startswith(_BATCH)
            must = _SAME_ROWS if of_batch else "compile the same model, loss function and optimizer"
            raise UserError(
                f"the ranks compile different programs: where {kind} {one}{here} on rank 0, {kind} {two}{there} on "
                f"rank {rank}; every process must {must}"
            )


def _nodes(graph: LogicalGraph) -> Iterator[_Line]:
    """The nodes of a graph in words, but for their layouts."""
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    for node in graph.nodes:
        yield from _words(node, keys)


def _words(node: Node, keys: dict[str, str]) -> Iterator[_Line]:
    if isinstance(node, Input):
        value = node.value
        yield f"the {node.role} {node.key} {value.dtype}{list(value.shape)}", ""
    elif isinstance(node, Call) and node.hint is None:
        made = ", ".join(f"{value.dtype}{list(value.shape)}" for value in node.makes)
        given = (*node.args, *(value for _, value in node.kwargs))
        numbers = [arg for arg in given if _is_plain(arg)]
        text = f" with {', '.join(map(repr, numbers))}" if numbers else ""
        yield f"{node.op}{text} -> {made}", f" at {node.location}"
    elif isinstance(node, Update):
        yield f"an update by {node.rule} of {keys[node.target.name]} in group {node.group}", ""
    elif isinstance(node, Output):
        yield f"the result {node.key}", ""


def _is_plain(arg: object) -> bool:
    return isinstance(arg, bool | int | float | str) or (
        isinstance(arg, tuple) and all(map(_is_plain, arg))
    )


def _layouts(graph: LogicalGraph) -> Iterator[_Line]:
    for node in graph.of_kind(Input):
        yield f"{node.key} {node.value.layout}", ""
    for node in graph.of_kind(Call):
        yield (
            f"{node.op} {', '.join(str(each.layout) for each in node.makes)}",
            f" at {node.location}",
        )
