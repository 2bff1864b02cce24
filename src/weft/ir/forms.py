"""The text of graphs and plans: one `LineForm` for each kind of line, by which it is printed and read back.

Placements are declared once, at the top, as `placement @0 = cpu [[0, 1], [2, 3]]`; a layout is then
`@0(S(0), B)`. Arguments are written as Python would, values as `%name`, constants of torch as
`!dtype:float32`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from string import Formatter
from typing import Any, final, get_args

from weft.ir.nodes import (
    FORWARD,
    ROLES,
    Box,
    Call,
    Hint,
    Input,
    Location,
    Node,
    Output,
    PerMicroBatch,
    Ref,
    Sent,
    Update,
    UpdateBytes,
    Value,
)
from weft.ir.plan_nodes import (
    COLLECTIVE_KINDS,
    Actor,
    Collective,
    Communicate,
    Communicator,
    Compute,
    Exchange,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalInput,
    LocalNode,
    LocalOutput,
    LocalUpdate,
    LocalValue,
    Order,
    Register,
    RegisterKind,
    Transfer,
)
from weft.ir.scanner import Scanner
from weft.layout import Layout, Placement, Shares
from weft.ops.call import Token

# Prints a value, given the placements of the graph; and reads one, given the name that is before it.
_Show = Callable[[Any, Sequence[Placement]], str]
_Read = Callable[[Scanner, Any], Any]
# The words and signs between the fields of a form.
_WORDS = re.compile(r"[A-Za-z_]+|->|[():=]")


@final
class LineForm:
    """One kind of line, or of a part: `template` gives the text form of a class's fields.

    `{field:kind}` is a field (see `_KINDS`), or the whole object where it has no name. `[ word {field:kind}]` stands
    only where the field is not as its class gives it by default, `[ word]` where the field `word` is true.
    """

    def __init__(self, kind: type, template: str, make: Callable[..., Any] | None = None) -> None:
        self._make = make or kind
        self._defaults = {x.name: () if x.default is MISSING else x.default for x in fields(kind)}
        # For each group of parts, the field by which it may be left out; a part is a text, its words, field and kind.
        self._groups: list[tuple[str, list[tuple[str, list[str], str, str | None]]]] = []
        for group in filter(None, re.split(r"(\[.*?\])", template)):
            parts = [
                (text, _WORDS.findall(text), text.strip() if field is None else field, spec)
                for text, field, spec, _ in Formatter().parse(group.strip("[]"))
            ]
            self._groups.append((parts[0][2] if group[0] == "[" else "", parts))

    def show(self, node: Any, placements: Sequence[Placement] = ()) -> str:
        """The text of an object of the class."""
        shown = []
        for optional, parts in self._groups:
            if optional and getattr(node, optional) == self._defaults[optional]:
                continue
            for text, _, field, kind in parts:
                shown.append(text)
                if kind:
                    value = getattr(node, field) if field else node
                    shown.append(_KINDS[kind][0](value, placements))
        return "".join(shown)

    def read(self, scanner: Scanner, **known: Any) -> Any:
        """The object that the text in front of a scanner describes; `known` are fields, or names of their values."""
        for optional, parts in self._groups:
            if optional and not scanner.accept(parts[0][1][0]):
                known[optional] = self._defaults[optional]
                continue
            for place, (_, words, field, kind) in enumerate(parts):
                for word in words[1:] if optional and not place else words:
                    scanner.expect(word)
                if not kind:
                    known |= {field: True} if optional else {}
                elif field:
                    known[field] = _KINDS[kind][1](scanner, known.get(field))
                else:
                    known |= _KINDS[kind][1](scanner, None)
        return self._make(**known)


# ------------------------------------------------------------------------------------------ arguments


def quoted(text: str) -> str:
    """A string in double quotes, with JSON's escapes."""
    return json.dumps(text)


def argument_text(arg: Any) -> str:
    """One argument tree, such as `(%x, [2, 3], !dtype:float32, 1e-05)`; tuples are written as lists."""
    match arg:
        case Ref(name=name):
            return f"%{name}"
        case Token(kind=kind, name=name):
            return f"!{kind}:{name}"
        case PerMicroBatch(values=values):
            return f"vary({', '.join(map(argument_text, values))})"
        case str():
            return quoted(arg)
        case tuple():
            return f"[{', '.join(map(argument_text, arg))}]"
        case float() if not math.isfinite(arg):
            return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(arg, "NaN")
        case _:
            return repr(arg)


def _call_text(call: Any, _: Any) -> str:
    """An op with its arguments: `aten.sum.dim_IntList(%x, [0], dtype=!dtype:float32)`."""
    shown = [argument_text(arg) for arg in call.args]
    shown += [f"{key}={argument_text(arg)}" for key, arg in call.kwargs]
    return f"{call.op}({', '.join(shown)})"


def _names(names: Iterable[str]) -> str:
    return ", ".join([f"%{name}" for name in names])


def targets_text(values: Iterable[Any]) -> str:
    """The names on the left side of a line, `%a, _, %b`; `_` for a result that is not a tensor."""
    return ", ".join(["_" if value is None else f"%{value.name}" for value in values])


# --------------------------------------------------------------------------------- shapes and layouts


def _type_text(value: Value | LocalValue | None, placements: Sequence[Placement]) -> str:
    """Shape and dtype, and the layout where a value has one: `float32[8, 16] @0(S(0), B)`."""
    if value is None:
        return "_"
    text = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    layout: Layout | None = getattr(value, "layout", None)
    if layout is None:
        return text
    sbp = ", ".join(map(str, layout.sbp))
    return f"{text} @{placements.index(layout.placement)}({sbp})"


def _read_value(scanner: Scanner, name: str | None) -> Value | None:
    if name is None:
        scanner.expect("_")
        return None
    dtype = scanner.take("word")
    return Value(name, scanner.integers(), dtype, scanner.layout())


def _read_local(scanner: Scanner, name: str | None) -> LocalValue | None:
    if name is None:
        scanner.expect("_")
        return None
    dtype = scanner.take("word")
    return LocalValue(name, scanner.integers(), dtype)


def _types(read: _Read) -> tuple[_Show, _Read]:
    """The types of the results of a call, in order."""

    def read_all(scanner: Scanner, names: Sequence[str | None]) -> tuple[Any, ...]:
        values = []
        for index, name in enumerate(names):
            if index:
                scanner.expect(",")
            values.append(read(scanner, name))
        return tuple(values)

    return lambda values, at: ", ".join([_type_text(value, at) for value in values]), read_all


# -------------------------------------------------------------------------------------- other fields


def _update_bytes(scanner: Scanner) -> UpdateBytes:
    sizes = scanner.integers()
    if len(sizes) != 3:
        raise scanner.error(f"expected three sizes, got {len(sizes)}")
    return UpdateBytes(*sizes)


def _acts(scanner: Scanner) -> Any:
    acts = scanner.argument()
    if not isinstance(acts, tuple) or any(not isinstance(a, tuple) or len(a) != 2 for a in acts):
        raise scanner.error("expected a list of [actor, micro-batch]")
    return acts


def _leaves(side: str) -> tuple[_Show, _Read]:
    """The keys of a feed or fetch, each with the name of its value."""

    def show(actor: Any, _: Any) -> str:
        pairs = zip(actor.keys, getattr(actor, side), strict=True)
        return ", ".join([f"{quoted(key)} %{name}" for key, name in pairs])

    def read(scanner: Scanner, _: Any) -> Mapping[str, tuple[str, ...]]:
        keys, names = [], []
        while scanner.kind() == "string":
            keys.append(scanner.string())
            names.append(scanner.name())
            scanner.accept(",")
        return {"keys": tuple(keys), side: tuple(names)}

    return show, read


def _exchange_text(node: Exchange, _: Any) -> str:
    """Everything that a collective or transfer says of itself, as `(comm=0, dim=0, sizes=[4, 4], bytes=32)`."""
    details: dict[str, object] = {"comm": node.communicator}
    if isinstance(node, Transfer):
        details |= {"sends": node.sends, "receives": node.receives}
    else:
        if node.kind in ("all_reduce", "reduce_scatter"):
            details["reduction"] = node.reduction
        if node.kind != "all_reduce":
            details |= {"dim": node.dim, "sizes": node.sizes}
        if node.kind == "all_to_all":
            details |= {"split_dim": node.split_dim, "split_sizes": node.split_sizes}
    details["bytes"] = node.bytes
    if isinstance(node, Collective) and node.in_place:
        details["in_place"] = True
    return f"({', '.join([f'{key}={argument_text(value)}' for key, value in details.items()])})"


def _exchange_details(scanner: Scanner, _: Any) -> Mapping[str, Any]:
    scanner.expect("(")
    details = {}
    while not scanner.accept(")"):
        key = scanner.take("word")
        scanner.expect("=")
        details[key] = scanner.argument()
        scanner.accept(",")
    details["communicator"] = details.pop("comm")
    return details


def _one_of(words: Any, else_: str = "") -> tuple[_Show, _Read]:
    return lambda word, _: word, lambda scanner, _: scanner.one_of(words, else_)


def _plain(show: Callable[[Any], str], read: Callable[[Scanner], Any]) -> tuple[_Show, _Read]:
    return lambda value, _: show(value), lambda scanner, _: read(scanner)


_LOCATION = LineForm(
    Location,
    "{file:string}:{line:int}[ in {module:string}][ stage {stage:int}]"
    "[ checkpoint {checkpoint:int}][ backward]",
)

# How each kind of field is printed and read. Those of the last rows may be nothing, and begin by a blank.
_KINDS: dict[str, tuple[_Show, _Read]] = {
    "int": _plain(str, Scanner.integer),
    "ints": _plain(argument_text, Scanner.integers),
    "string": _plain(quoted, Scanner.string),
    "name": _plain(lambda name: f"%{name}", Scanner.name),
    "names": _plain(_names, lambda scanner: tuple(scanner.names())),
    "some": _plain(_names, lambda x: tuple(x.names()) if x.kind() == "value" else ()),
    "list": _plain(lambda names: f"[{_names(names)}]", Scanner.references),
    "ref": _plain(lambda ref: f"%{ref.name}", lambda scanner: Ref(scanner.name())),
    "refs": _plain(targets_text, lambda scanner: tuple(map(Ref, scanner.names()))),
    "value": _plain(lambda value: targets_text([value]), Scanner.target),
    "role": _one_of(ROLES),
    "other": _one_of(ROLES, "call, box or "),
    "sent": _one_of(get_args(Sent)),
    "register": _one_of(get_args(RegisterKind)),
    "laid": (_type_text, _read_value),
    "type": (_type_text, _read_local),
    "all laid": _types(_read_value),
    "types": _types(_read_local),
    "call": (_call_text, lambda scanner, _: scanner.call()),
    "shares": _plain(
        lambda shares: f"{shares.dim} {argument_text(shares.parts)} {shares.blocks}",
        lambda x: Shares(x.integer(), x.integers(), x.integer()),
    ),
    "hint": _plain(
        lambda hint: f"({hint})" + ("" if hint.stored is None else f" stored {hint.stored}"),
        lambda x: Hint(x.free_sbps(), x.integer() if x.accept("stored") else None),
    ),
    "sizes": _plain(lambda x: str([x.alone, x.left, x.together]), _update_bytes),
    "acts": _plain(argument_text, _acts),
    "feeds": _leaves("produces"),
    "fetches": _leaves("consumes"),
    "details": (_exchange_text, _exchange_details),
    "place": _plain(_LOCATION.show, _LOCATION.read),
    "phase": _plain(lambda phase: "" if phase == FORWARD else f" {phase}", Scanner.phase),
    "count": _plain(lambda n: "" if n is None else f" #{n}", Scanner.count),
    "whole": _plain(lambda x: "" if x else " whole", lambda scanner: not scanner.accept("whole")),
}
_ACTS = "[ acts {acts:int}][ priority {priority:int}]{phase:phase}"

# Lines of graphs; what a node makes is before those of the second three, with a `=`.
UPDATE = LineForm(
    Update,
    "update {rule:string} group {group:int} {target:ref} from {source:ref}[ states {states:refs}]"
    "{elementwise:whole}[ skip {skip:ref}][ takes {takes:sizes}]",
)
OUTPUT = LineForm(Output, "output {key:string} {value:ref}")
INPUT = LineForm(
    Input,
    "{role:other} {key:string}[ shares {shares:shares}][ cut][ sent {sent:sent}] : {value:laid}",
)
CALL = LineForm(
    Call,
    "call {:call} : {outputs:all laid}[ hint{hint:hint}]{phase:phase}{autograd:count}"
    "[ at {location:place}]",
    Call.of,
)
BOX = LineForm(Box, "box {input:ref} : {output:laid}[ for {cause:string}]")

# Lines of the programs and plans of ranks.
LOCAL_UPDATE = LineForm(
    LocalUpdate,
    "update {rule:string} group {group:int} {key:string} {target:name} from {source:name}"
    "[ states {states:names}][ skip {skip:name}][ takes {takes:sizes}]{phase:phase}",
)
LOCAL_CALL = LineForm(LocalCall, "call {:call} : {outputs:types}{phase:phase}", LocalCall.of)
EXCHANGES: dict[str, LineForm] = {
    kind: LineForm(
        of, kind + " {input:value} : {input:type} -> {output:type} {:details}{phase:phase}"
    )
    for kind, of in (("transfer", Transfer), *((each, Collective) for each in COLLECTIVE_KINDS))
}
# Lines that begin with a word of their own.
PARTS: dict[str, LineForm] = {
    "communicator": LineForm(Communicator, "communicator {id:int} = {ranks:ints}"),
    "input": LineForm(LocalInput, "input {value:value} = {role:role} {key:string} : {value:type}"),
    "output": LineForm(LocalOutput, "output {key:string} {name:name}"),
    "order": LineForm(Order, "order {queue:string} {acts:acts}"),
    "register": LineForm(
        Register,
        "register {value:value} : {value:type} {kind:register} credits {credits:int}"
        "[ rate {rate:int}] from {producer:int} to {consumers:ints}[ full]",
    ),
}
# Of an actor, the text after its number and queue; what it does is on lines below.
ACTORS: dict[str, LineForm] = {
    "feed": LineForm(Feed, "feed {:feeds}"),
    "fetch": LineForm(Fetch, "fetch {:fetches}"),
    "hold": LineForm(Hold, "hold {produces:some}"),
    "compute": LineForm(
        Compute,
        f"compute {{consumes:list}} -> {{produces:list}}{_ACTS}"
        "[ copies {copies:list}][ parts {parts:ints}][ replayed]",
    ),
    "communicate": LineForm(
        Communicate, f"communicate[ waits {{waits:list}}][ signals {{signals:list}}]{_ACTS}"
    ),
}


def node_text(node: Node, placements: Sequence[Placement]) -> str:
    """One node of a graph on one line; a layout's placement must be in `placements`."""
    match node:
        case Update():
            return UPDATE.show(node)
        case Output():
            return OUTPUT.show(node)
        case Call():
            return f"{targets_text(node.outputs)} = {CALL.show(node, placements)}"
        case _:
            form = BOX if isinstance(node, Box) else INPUT
            return f"{targets_text(node.makes)} = {form.show(node, placements)}"


def local_text(node: LocalNode) -> str:
    """One local node on one line."""
    match node:
        case LocalUpdate():
            return LOCAL_UPDATE.show(node)
        case LocalCall():
            return f"{targets_text(node.outputs)} = {LOCAL_CALL.show(node)}"
        case _:
            return f"{targets_text([node.output])} = {EXCHANGES[node.kind].show(node)}"


def part_text(part: Communicator | LocalInput | LocalOutput | Order | Register) -> str:
    """Another part of a plan or local program on one line."""
    return PARTS[type(part).__name__.removeprefix("Local").lower()].show(part)


def actor_text(actor: Actor) -> str:
    """An actor: number, kind and queue on one line, what it does on lines below."""
    head = ACTORS[type(actor).__name__.lower()].show(actor)
    body: Sequence[LocalNode] = ()
    if isinstance(actor, Compute | Communicate):
        body = actor.nodes if isinstance(actor, Compute) else actor.collectives
    lines = [f"  {local_text(node)}" for node in body]
    return "\n".join([f"actor {actor.id} on {quoted(actor.queue)} {head}", *lines])


def micro_text(micro_batches: int) -> str:
    """` micro 4` in the header of a graph or a rank's plan; nothing for one micro-batch."""
    return "" if micro_batches == 1 else f" micro {micro_batches}"
