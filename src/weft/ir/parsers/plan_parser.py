"""Read the text of a plan (see `weft.ir.printers`): `parse_plan(str(plan)) == plan`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, final, get_args

from weft.ir.nodes import ROLES, Phase, Ref
from weft.ir.parsers.scanner import Scanner
from weft.ir.plan import Plan, RankPlan
from weft.ir.plan_nodes import (
    COLLECTIVE_KINDS,
    Actor,
    Collective,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalInput,
    LocalNode,
    LocalUpdate,
    LocalValue,
    Order,
    Register,
    RegisterKind,
    Transfer,
)
from weft.ops.call import TensorSpec


@final
@dataclass(frozen=True)
class _Rank:
    """One rank's plan while its lines are read; the lines of an actor's body follow its head."""

    rank: int
    micro_batches: int = 1
    orders: list[Order] = field(default_factory=list)
    inputs: list[LocalInput] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    heads: list[tuple[Actor, list[LocalNode]]] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)


def parse_plan(text: str) -> Plan:
    """The plan that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    name, communicators = "", []
    ranks: list[_Rank] = []
    for number, line in enumerate(text.splitlines(), 1):
        scanner = Scanner(line, number, ranks[-1].specs if ranks else None)
        with scanner.told():
            if number == 1:
                scanner.expect("plan")
                name = scanner.string()
            elif scanner.accept("communicator"):
                communicators.append(_communicator(scanner))
            elif scanner.accept("rank"):
                ranks.append(_Rank(scanner.integer(), scanner.micro()))
            elif not ranks:
                raise scanner.error("expected a communicator or a rank")
            else:
                _rank_line(scanner, ranks[-1])
            scanner.end()
    return Plan(name, tuple(communicators), tuple(map(_finish, ranks)))


def _communicator(scanner: Scanner) -> Communicator:
    number = scanner.integer()
    scanner.expect("=")
    return Communicator(number, scanner.integers())


def _rank_line(scanner: Scanner, rank: _Rank) -> None:
    if scanner.accept("input"):
        rank.inputs.append(input_of(scanner))
        scanner.specs[rank.inputs[-1].value.name] = rank.inputs[-1].value.spec
    elif scanner.accept("order"):
        rank.orders.append(_order(scanner))
    elif scanner.accept("register"):
        rank.registers.append(_register(scanner))
        scanner.specs[rank.registers[-1].value.name] = rank.registers[-1].value.spec
    elif scanner.accept("actor"):
        rank.heads.append((_actor(scanner), []))
    elif rank.heads:
        node = local_node(scanner)
        rank.heads[-1][1].append(node)
        scanner.specs.update((value.name, value.spec) for value in node.makes)
    else:
        raise scanner.error("expected an input, an order, a register or an actor")


def _finish(rank: _Rank) -> RankPlan:
    actors = tuple(_with_body(actor, body) for actor, body in rank.heads)
    inputs, registers, orders = tuple(rank.inputs), tuple(rank.registers), tuple(rank.orders)
    return RankPlan(rank.rank, inputs, actors, registers, rank.micro_batches, orders)


def _with_body(actor: Actor, body: list[Any]) -> Actor:
    match actor:
        case Compute():
            return replace(actor, nodes=tuple(body))
        case Communicate():
            return replace(actor, collectives=tuple(body))
        case _:
            return actor


def _order(scanner: Scanner) -> Order:
    queue, acts = scanner.string(), scanner.argument()
    pairs = isinstance(acts, tuple) and all(isinstance(a, tuple) and len(a) == 2 for a in acts)
    if not pairs:
        raise scanner.error("expected a list of [actor, micro-batch]")
    return Order(queue, acts)


def input_of(scanner: Scanner) -> LocalInput:
    """Parse the text after `input`: `%w = parameter "fc.weight" : float32[10, 20]`."""
    name = scanner.name()
    scanner.expect("=")
    role, key = scanner.one_of(ROLES), scanner.string()
    scanner.expect(":")
    return LocalInput(_value(scanner, name), role, key)


def _value(scanner: Scanner, name: str) -> LocalValue:
    shape, dtype = scanner.tensor()
    return LocalValue(name, shape, dtype)


def _register(scanner: Scanner) -> Register:
    name = scanner.name()
    scanner.expect(":")
    value = _value(scanner, name)
    kinds: tuple[RegisterKind, ...] = get_args(RegisterKind)
    kind = scanner.one_of(kinds)
    scanner.expect("credits")
    credit_count = scanner.integer()
    rate = scanner.integer() if scanner.accept("rate") else 1
    scanner.expect("from")
    producer = scanner.integer()
    scanner.expect("to")
    consumers = scanner.integers()
    full = scanner.accept("full")
    return Register(value, kind, producer, consumers, credit_count, full, rate)


def _actor(scanner: Scanner) -> Actor:
    number = scanner.integer()
    scanner.expect("on")
    queue = scanner.string()
    word = scanner.take("word")
    match word:
        case "feed":
            keys, names = _pairs(scanner)
            return Feed(number, keys, names, queue)
        case "fetch":
            keys, names = _pairs(scanner)
            return Fetch(number, keys, names, queue)
        case "hold":
            return Hold(number, tuple(scanner.names()) if scanner.kind() == "value" else (), queue)
        case "compute":
            consumes = _references(scanner)
            scanner.expect("->")
            produces = _references(scanner)
            acts = _acts(scanner)
            return Compute(number, (), consumes, produces, queue, *acts, *_segment(scanner))
        case "communicate":
            waits = _references(scanner) if scanner.accept("waits") else ()
            signals = _references(scanner) if scanner.accept("signals") else ()
            return Communicate(number, (), queue, *_acts(scanner), waits, signals)
    raise scanner.error(f"expected feed, fetch, hold, compute or communicate, found {word!r}")


def _acts(scanner: Scanner) -> tuple[int, int, Phase]:
    """` acts 4 priority 2 {1 backward}`, each of them only where it differs from the default."""
    acts = scanner.integer() if scanner.accept("acts") else 1
    priority = scanner.integer() if scanner.accept("priority") else 0
    return acts, priority, scanner.phase()


def _segment(scanner: Scanner) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """` copies [%a] parts [3, 9] replayed`, each of them only where it differs from the default."""
    copies = _references(scanner) if scanner.accept("copies") else ()
    parts = scanner.integers() if scanner.accept("parts") else ()
    return copies, parts, scanner.accept("replayed")


def _pairs(scanner: Scanner) -> tuple[tuple[str, ...], tuple[str, ...]]:
    keys, names = [], []
    while scanner.kind() == "string":
        keys.append(scanner.string())
        names.append(scanner.name())
        scanner.accept(",")
    return tuple(keys), tuple(names)


def _references(scanner: Scanner) -> tuple[str, ...]:
    items = scanner.argument()
    if not isinstance(items, tuple) or not all(isinstance(item, Ref) for item in items):
        raise scanner.error("expected a list of values")
    return tuple(item.name for item in items)


def local_node(scanner: Scanner) -> LocalNode:
    """The line of a local node."""
    if scanner.accept("update"):
        return _update(scanner)
    names = scanner.targets()
    scanner.expect("=")
    if scanner.accept("call"):
        op, args, kwargs = scanner.call()
        scanner.expect(":")
        outputs = []
        for index, name in enumerate(names):
            if index:
                scanner.expect(",")
            outputs.append(_optional_value(scanner, name))
        return LocalCall.of(op, args, tuple(outputs), scanner.phase(), kwargs=kwargs)
    if len(names) != 1:
        raise scanner.error("expected call")
    return _exchange(scanner, names[0])


def _exchange(scanner: Scanner, name: str | None) -> LocalNode:
    """Parse the text after `%name =` in the line of a collective or a transfer."""
    word = scanner.take("word")
    source = None if scanner.accept("_") else scanner.name()
    scanner.expect(":")
    before = _optional_value(scanner, source)
    scanner.expect("->")
    after = _optional_value(scanner, name)
    fields = dict(_fields(scanner))
    communicator = fields.pop("comm")
    fields["phase"] = scanner.phase()
    if word == "transfer":
        return Transfer(communicator, before, after, **fields)
    kind = next((kind for kind in COLLECTIVE_KINDS if kind == word), None)
    if kind is None or before is None or after is None:
        raise scanner.error(f"expected call, a transfer or a collective of a value, found {word!r}")
    return Collective(kind, communicator, before, after, **fields)


def _optional_value(scanner: Scanner, name: str | None) -> LocalValue | None:
    if name is None:
        scanner.expect("_")
        return None
    return _value(scanner, name)


def _fields(scanner: Scanner) -> list[tuple[str, Any]]:
    scanner.expect("(")
    found = []
    while not scanner.accept(")"):
        key = scanner.take("word")
        scanner.expect("=")
        found.append((key, scanner.argument()))
        scanner.accept(",")
    return found


def _update(scanner: Scanner) -> LocalUpdate:
    rule = scanner.string()
    scanner.expect("group")
    group = scanner.integer()
    key = scanner.string()
    target = scanner.name()
    scanner.expect("from")
    source = scanner.name()
    states = tuple(scanner.names()) if scanner.accept("states") else ()
    skip = scanner.name() if scanner.accept("skip") else None
    takes, phase = scanner.taken(), scanner.phase()
    return LocalUpdate(rule, target, source, states, group, key, phase, skip, takes)
