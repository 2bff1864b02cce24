"""Read the text of a logical graph (see `weft.ir.printers`): `parse_graph(str(graph)) == graph`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from weft.ir.logical import (
    ROLES,
    Box,
    Call,
    Hint,
    Input,
    Location,
    LogicalGraph,
    Node,
    Output,
    Ref,
    Update,
    Value,
)
from weft.ir.nodes import Sent
from weft.ir.parsers.plan_parser import input_of, local_node
from weft.ir.parsers.scanner import Scanner
from weft.ir.plan import LocalInput, LocalNode, LocalOutput, LocalProgram
from weft.layout import Placement, Shares
from weft.ops.call import TensorSpec


def parse_graph(text: str) -> LogicalGraph:
    """The graph that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    lines = _scanners(text)
    header = next(lines, None)
    if header is None:
        raise Scanner("", 1).error('expected graph "name", found nothing')
    with header.told():
        header.expect("graph")
        name, micro_batches = header.string(), header.micro()
        header.end()
    placements: list[Placement] = []
    nodes: list[Node] = []
    for scanner in lines:
        with scanner.told():
            if scanner.accept("placement"):
                placements.append(scanner.placement(len(placements)))
            else:
                nodes.append(_node(scanner, placements))
                scanner.specs.update((value.name, value.spec) for value in nodes[-1].makes)
            scanner.end()
    return LogicalGraph(name, tuple(nodes), micro_batches)


def _node(scanner: Scanner, placements: list[Placement]) -> Node:
    if scanner.accept("update"):
        return _update(scanner)
    if scanner.accept("output"):
        key = scanner.string()
        return Output(Ref(scanner.name()), key)
    names = scanner.targets()
    scanner.expect("=")
    if scanner.accept("call"):
        return _call(scanner, names, placements)
    if len(names) != 1 or names[0] is None:
        raise scanner.error("only a call may have several outputs or none; expected one")
    if scanner.accept("box"):
        source = scanner.name()
        scanner.expect(":")
        output = _value(scanner, names[0], placements)
        return Box(Ref(source), output, scanner.string() if scanner.accept("for") else "")
    return _input(scanner, names[0], placements)


def _value(scanner: Scanner, name: str, placements: list[Placement]) -> Value:
    shape, dtype = scanner.tensor()
    return Value(name, shape, dtype, scanner.layout(placements))


def _call(scanner: Scanner, names: list[str | None], placements: list[Placement]) -> Call:
    op, args, kwargs = scanner.call()
    scanner.expect(":")
    outputs: list[Value | None] = []
    for index, name in enumerate(names):
        if index:
            scanner.expect(",")
        if name is None:
            scanner.expect("_")
        outputs.append(None if name is None else _value(scanner, name, placements))
    hint, phase, autograd = _hint(scanner), scanner.phase(), scanner.count()
    return Call.of(
        op,
        args,
        tuple(outputs),
        kwargs=kwargs,
        location=_location(scanner),
        phase=phase,
        autograd=autograd,
        hint=hint,
    )


def _hint(scanner: Scanner) -> Hint | None:
    if not scanner.accept("hint"):
        return None
    sbps = scanner.free_sbps()
    return Hint(sbps, scanner.integer() if scanner.accept("stored") else None)


def _location(scanner: Scanner) -> Location | None:
    if not scanner.accept("at"):
        return None
    file = scanner.string()
    scanner.expect(":")
    line = scanner.integer()
    module = scanner.string() if scanner.accept("in") else ""
    stage = scanner.integer() if scanner.accept("stage") else None
    checkpoint = scanner.integer() if scanner.accept("checkpoint") else None
    return Location(file, line, module, scanner.accept("backward"), stage, checkpoint)


def _input(scanner: Scanner, name: str, placements: list[Placement]) -> Input:
    role, key = scanner.one_of(ROLES, "call, box or "), scanner.string()
    shares, cut, sent = _shares(scanner), scanner.accept("cut"), _sent(scanner)
    scanner.expect(":")
    return Input(_value(scanner, name, placements), role, key, shares, cut, sent)


def _sent(scanner: Scanner) -> Sent | None:
    if not scanner.accept("sent"):
        return None
    ways: tuple[Sent, ...] = get_args(Sent)
    return scanner.one_of(ways)


def _shares(scanner: Scanner) -> Shares | None:
    if not scanner.accept("shares"):
        return None
    return Shares(scanner.integer(), scanner.integers(), scanner.integer())


def _update(scanner: Scanner) -> Update:
    rule = scanner.string()
    scanner.expect("group")
    group = scanner.integer()
    target = Ref(scanner.name())
    scanner.expect("from")
    source = Ref(scanner.name())
    states = tuple(map(Ref, scanner.names())) if scanner.accept("states") else ()
    whole = scanner.accept("whole")
    skip = Ref(scanner.name()) if scanner.accept("skip") else None
    return Update(rule, target, source, states, group, not whole, skip, scanner.taken())


def parse_local(text: str) -> LocalProgram:
    """The program that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    lines = _scanners(text)
    head = next(lines, None) or Scanner("", 1)
    with head.told():
        for word in ("local", "program", "of", "rank"):
            head.expect(word)
        rank, micro_batches = head.integer(), head.micro()
        head.end()
    loop: frozenset[str] = frozenset()
    origins: dict[str, str] = {}
    inputs: list[LocalInput] = []
    nodes: list[LocalNode] = []
    outputs: list[LocalOutput] = []
    for scanner in lines:
        with scanner.told():
            if scanner.accept("loop"):
                names = set()
                while scanner.kind() == "value":
                    names.add(scanner.name())
                loop |= frozenset(names)
            elif scanner.accept("form"):
                name = scanner.name()
                scanner.expect("of")
                origins[name] = scanner.name()
            elif scanner.accept("input"):
                inputs.append(input_of(scanner))
                scanner.specs[inputs[-1].value.name] = inputs[-1].value.spec
            elif scanner.accept("output"):
                key = scanner.string()
                outputs.append(LocalOutput(scanner.name(), key))
            else:
                nodes.append(local_node(scanner))
                scanner.specs.update((value.name, value.spec) for value in nodes[-1].makes)
            scanner.end()
    parts = tuple(inputs), tuple(nodes), tuple(outputs)
    return LocalProgram(rank, *parts, micro_batches, loop, origins)


def _scanners(text: str) -> Iterator[Scanner]:
    """One for each line that is not empty."""
    specs: dict[str, TensorSpec] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Scanner(line, number, specs)
