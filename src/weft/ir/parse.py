"""Read the text of graphs, local programs and plans (see `weft.ir.forms`): `parse_graph(str(graph)) == graph`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final

from weft.ir.forms import (
    ACTORS,
    BOX,
    CALL,
    EXCHANGES,
    INPUT,
    LOCAL_CALL,
    LOCAL_UPDATE,
    OUTPUT,
    PARTS,
    UPDATE,
)
from weft.ir.logical import LogicalGraph
from weft.ir.nodes import Node
from weft.ir.plan import Actor, Communicator, Compute, LocalNode, LocalProgram, Plan, RankPlan
from weft.ir.plan_nodes import Feed, Fetch, Hold
from weft.ir.scanner import Scanner
from weft.layout import Placement
from weft.ops.call import TensorSpec


def parse_graph(text: str) -> LogicalGraph:
    """The graph that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    header, *lines = _scanners(text)
    with header.told():
        header.expect("graph")
        name, micro_batches = header.string(), header.micro()
    nodes: list[Node] = []
    for scanner in lines:
        with scanner.told():
            if scanner.accept("placement"):
                scanner.declare_placement()
            else:
                nodes.append(_node(scanner))
                scanner.know(*nodes[-1].makes)
    return LogicalGraph(name, tuple(nodes), micro_batches)


def _node(scanner: Scanner) -> Any:
    if scanner.peek() in ("update", "output"):
        return (UPDATE if scanner.peek() == "update" else OUTPUT).read(scanner)
    names = scanner.targets()
    scanner.expect("=")
    if scanner.peek() == "call":
        return CALL.read(scanner, outputs=names)
    if len(names) != 1 or names[0] is None:
        raise scanner.error("only a call may have several outputs or none; expected one")
    if scanner.peek() == "box":
        return BOX.read(scanner, output=names[0])
    return INPUT.read(scanner, value=names[0])


def parse_local(text: str) -> LocalProgram:
    """The program that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    header, *lines = _scanners(text)
    with header.told():
        for word in ("local", "program", "of", "rank"):
            header.expect(word)
        rank, micro_batches = header.integer(), header.micro()
    loop: set[str] = set()
    origins: dict[str, str] = {}
    parts: dict[str, list[Any]] = {"input": [], "output": []}
    nodes: list[LocalNode] = []
    for scanner in lines:
        with scanner.told():
            if scanner.accept("loop"):
                while scanner.kind() == "value":
                    loop.add(scanner.name())
            elif scanner.accept("form"):
                name = scanner.name()
                scanner.expect("of")
                origins[name] = scanner.name()
            elif scanner.peek() in parts:
                _read_part(scanner, parts)
            else:
                nodes.append(_local_node(scanner))
    inputs, outputs = map(tuple, parts.values())
    return LocalProgram(
        rank, inputs, tuple(nodes), outputs, micro_batches, frozenset(loop), origins
    )


@final
@dataclass(slots=True)
class _Rank:
    """One rank's plan while its lines are read; the lines of an actor's body follow its head."""

    rank: int
    micro_batches: int
    parts: dict[str, list[Any]] = field(
        default_factory=lambda: {"input": [], "register": [], "order": []}
    )
    actors: list[tuple[Actor, list[Any]]] = field(default_factory=list)

    def finished(self) -> RankPlan:
        inputs, registers, orders = map(tuple, self.parts.values())
        actors = tuple(
            replace(actor, nodes=tuple(body))
            if isinstance(actor, Compute)
            else actor
            if isinstance(actor, Feed | Fetch | Hold)
            else replace(actor, collectives=tuple(body))
            for actor, body in self.actors
        )
        return RankPlan(self.rank, inputs, actors, registers, self.micro_batches, orders)


def parse_plan(text: str) -> Plan:
    """The plan that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    header, *lines = _scanners(text)
    with header.told():
        header.expect("plan")
        name = header.string()
    communicators: list[Communicator] = []
    ranks: list[_Rank] = []
    for scanner in lines:
        with scanner.told():
            if scanner.peek() == "communicator":
                communicators.append(PARTS["communicator"].read(scanner))
            elif scanner.accept("rank"):
                ranks.append(_Rank(scanner.integer(), scanner.micro()))
                scanner.specs.clear()
            elif not ranks:
                raise scanner.error("expected a communicator or a rank")
            else:
                _rank_line(scanner, ranks[-1])
    return Plan(name, tuple(communicators), tuple([rank.finished() for rank in ranks]))


def _rank_line(scanner: Scanner, rank: _Rank) -> None:
    if scanner.peek() in rank.parts:
        _read_part(scanner, rank.parts)
    elif scanner.accept("actor"):
        number = scanner.integer()
        scanner.expect("on")
        queue, word = scanner.string(), scanner.peek()
        if word not in ACTORS:
            *others, last = ACTORS
            raise scanner.error(f"expected {', '.join(others)} or {last}, got {word!r}")
        body = {"compute": {"nodes": ()}, "communicate": {"collectives": ()}}.get(word, {})
        rank.actors.append((ACTORS[word].read(scanner, id=number, queue=queue, **body), []))
    elif rank.actors:
        rank.actors[-1][1].append(_local_node(scanner))
    else:
        raise scanner.error("expected an input, an order, a register or an actor")


def _read_part(scanner: Scanner, parts: dict[str, list[Any]]) -> None:
    word = scanner.peek()
    part = PARTS[word].read(scanner)
    parts[word].append(part)
    if word in ("input", "register"):
        scanner.know(part.value)


def _local_node(scanner: Scanner) -> LocalNode:
    if scanner.peek() == "update":
        update: LocalNode = LOCAL_UPDATE.read(scanner)
        return update
    names = scanner.targets()
    scanner.expect("=")
    word = scanner.peek()
    if word == "call":
        node: LocalNode = LOCAL_CALL.read(scanner, outputs=names)
    elif word in EXCHANGES and len(names) == 1:
        kind = {} if word == "transfer" else {"kind": word}
        node = EXCHANGES[word].read(scanner, output=names[0], **kind)
        if kind and (node.input is None or node.output is None):  # type: ignore[union-attr]
            raise scanner.error(f"expected a value before and after {word}")
    else:
        raise scanner.error(f"expected call, a transfer or a collective of a value, got {word!r}")
    scanner.know(*node.makes)
    return node


def _scanners(text: str) -> list[Scanner]:
    """One for each line that is not empty, of which the first one there must be."""
    specs: dict[str, TensorSpec] = {}
    placements: list[Placement] = []
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [Scanner(line, number, specs, placements) for number, line in lines or [(1, "")]]
