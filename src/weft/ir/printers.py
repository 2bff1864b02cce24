"""Text of graphs and plans, which `weft.ir.parsers` reads back to equal ones.

Placements are declared once, at the top, as `placement @0 = cpu [[0, 1], [2, 3]]`; a layout is then
`@0(S(0), B)`. Arguments are written as Python would, values as `%name`, constants of torch as
`!dtype:float32`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from weft.ir.nodes import (
    FORWARD,
    Box,
    Call,
    Hint,
    Input,
    Location,
    Node,
    Output,
    PerMicroBatch,
    Phase,
    Ref,
    Update,
    UpdateBytes,
    Value,
)
from weft.ir.plan_nodes import (
    Actor,
    Collective,
    Communicate,
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
    Transfer,
)
from weft.layout import Layout, Placement
from weft.ops.call import Token


def input_text(item: LocalInput) -> str:
    """`input %w = parameter "fc.weight" : float32[10, 20]`"""
    return f"input %{item.value.name} = {item.role} {quoted(item.key)} : {_type_text(item.value)}"


def output_text(output: LocalOutput) -> str:
    """`output "loss" %y`"""
    return f"output {quoted(output.key)} %{output.name}"


def register_text(register: Register) -> str:
    """`register %y : float32[8, 10] activation credits 1 from 2 to [3, 4]`, `full` before the first step."""
    value = register.value
    rate = "" if register.rate == 1 else f" rate {register.rate}"
    return (
        f"register %{value.name} : {_type_text(value)} {register.kind}"
        f" credits {register.credits}{rate} from {register.producer}"
        f" to {argument_text(register.consumers)}{' full' if register.full else ''}"
    )


def order_text(order: Order) -> str:
    """`order "comm:0" [[3, 0], [4, 0], [3, 1]]`"""
    return f"order {quoted(order.queue)} {argument_text(order.acts)}"


def actor_text(actor: Actor) -> str:
    """An actor: number, kind and queue on one line, what it does on lines below."""
    match actor:
        case Feed(keys=keys, produces=names):
            body = [
                "feed " + ", ".join(f"{quoted(k)} %{n}" for k, n in zip(keys, names, strict=True))
            ]
        case Fetch(keys=keys, consumes=names):
            body = [
                "fetch " + ", ".join(f"{quoted(k)} %{n}" for k, n in zip(keys, names, strict=True))
            ]
        case Hold(produces=names):
            body = [f"hold {_names(names)}"]
        case Compute(nodes=nodes, consumes=consumes, produces=produces):
            # The way in which a segment runs, as text, where not just as its nodes.
            copies = f" copies [{_names(actor.copies)}]" if actor.copies else ""
            parts = f" parts {argument_text(actor.parts)}" if actor.parts else ""
            how = _acts_text(actor) + (copies + parts + (" replayed" if actor.replayed else ""))
            body = [
                f"compute [{_names(consumes)}] -> [{_names(produces)}]{how}",
                *map(local_text, nodes),
            ]
        case Communicate(collectives=collectives):
            body = [
                f"communicate{_control_text(actor)}{_acts_text(actor)}",
                *map(local_text, collectives),
            ]
    lines = [
        f"actor {actor.id} on {quoted(actor.queue)} {body[0]}",
        *(f"  {line}" for line in body[1:]),
    ]
    return "\n".join(lines)


def _control_text(actor: Communicate) -> str:
    waits = f" waits [{_names(actor.waits)}]" if actor.waits else ""
    return waits + (f" signals [{_names(actor.signals)}]" if actor.signals else "")


def _acts_text(actor: Compute | Communicate) -> str:
    acts = "" if actor.acts == 1 else f" acts {actor.acts}"
    priority = f" priority {actor.priority}" if actor.priority else ""
    return acts + priority + phase_text(actor.phase)


def local_text(node: LocalNode) -> str:
    """One local node on one line."""
    match node:
        case LocalCall(op=op, args=args, kwargs=kwargs, outputs=outputs):
            names = ", ".join("_" if value is None else f"%{value.name}" for value in outputs)
            types = ", ".join("_" if value is None else _type_text(value) for value in outputs)
            after = phase_text(node.phase)
            return f"{names} = call {call_text(op, args, kwargs)} : {types}{after}"
        case LocalUpdate(rule=rule, group=group, key=key, target=target, source=source):
            states = f" states {_names(node.states)}" if node.states else ""
            head = f"update {quoted(rule)} group {group} {quoted(key)}"
            skip = f" skip %{node.skip}" if node.skip else ""
            after = taken_text(node.takes) + phase_text(node.phase)
            return f"{head} %{target} from %{source}{states}{skip}{after}"
        case Collective():
            return _collective_text(node)
        case Transfer():
            fields: list[tuple[str, object]] = [("comm", node.communicator), ("sends", node.sends)]
            fields += [("receives", node.receives), ("bytes", node.bytes)]
            return _exchange_text(node, fields)


def _collective_text(node: Collective) -> str:
    fields: list[tuple[str, object]] = [("comm", node.communicator)]
    if node.kind in ("all_reduce", "reduce_scatter"):
        fields.append(("reduction", node.reduction))
    if node.kind != "all_reduce":
        fields += [("dim", node.dim), ("sizes", node.sizes)]
    if node.kind == "all_to_all":
        fields += [("split_dim", node.split_dim), ("split_sizes", node.split_sizes)]
    fields.append(("bytes", node.bytes))
    if node.in_place:
        fields.append(("in_place", True))
    return _exchange_text(node, fields)


def _exchange_text(node: Exchange, fields: Iterable[tuple[str, object]]) -> str:
    before, after = node.input, node.output
    details = ", ".join(f"{key}={argument_text(value)}" for key, value in fields)
    names = ["_" if value is None else f"%{value.name}" for value in (before, after)]
    types = ["_" if value is None else _type_text(value) for value in (before, after)]
    line = f"{names[1]} = {node.kind} {names[0]} : {types[0]} -> {types[1]} ({details})"
    return line + phase_text(node.phase)


def _type_text(value: LocalValue) -> str:
    return tensor_text(value.shape, value.dtype)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"%{name}" for name in names)


def node_text(node: Node, placements: Sequence[Placement]) -> str:
    """One node on one line; a layout's placement must stand in `placements`."""
    match node:
        case Input(value=value, role=role, key=key):
            order = f" {node.shares}" if node.shares else ""
            how = (" cut" if node.cut else "") + (f" sent {node.sent}" if node.sent else "")
            return f"%{value.name} = {role} {quoted(key)}{order}{how} : {_value_text(value, placements)}"
        case Call(op=op, args=args, kwargs=kwargs, outputs=outputs, location=location):
            names = ", ".join("_" if value is None else f"%{value.name}" for value in outputs)
            types = ", ".join("_" if v is None else _value_text(v, placements) for v in outputs)
            pair = "" if node.autograd is None else f" #{node.autograd}"
            after = _hint_text(node.hint) + phase_text(node.phase) + pair + _location_text(location)
            return f"{names} = call {call_text(op, args, kwargs)} : {types}{after}"
        case Box(input=ref, output=output, cause=cause):
            because = f" for {quoted(cause)}" if cause else ""
            return f"%{output.name} = box %{ref.name} : {_value_text(output, placements)}{because}"
        case Update():
            return _update_text(node)
        case Output(value=ref, key=key):
            return f"output {quoted(key)} %{ref.name}"


def _update_text(node: Update) -> str:
    states = f" states {', '.join(f'%{ref.name}' for ref in node.states)}" if node.states else ""
    whole = "" if node.elementwise else " whole"
    skip = f" skip %{node.skip.name}" if node.skip else ""
    return (
        f"update {quoted(node.rule)} group {node.group} %{node.target.name} from %{node.source.name}"
        f"{states}{whole}{skip}{taken_text(node.takes)}"
    )


def _hint_text(hint: Hint | None) -> str:
    """` hint(S(0), *)`, or ` hint(S(0), *) stored 0`."""
    if hint is None:
        return ""
    return f" hint({hint})" + ("" if hint.stored is None else f" stored {hint.stored}")


def _value_text(value: Value, placements: Sequence[Placement]) -> str:
    return tensor_text(value.shape, value.dtype) + layout_text(value.layout, placements)


def _location_text(location: Location | None) -> str:
    if location is None:
        return ""
    module = f" in {quoted(location.module)}" if location.module else ""
    stage = "" if location.stage is None else f" stage {location.stage}"
    checkpoint = "" if location.checkpoint is None else f" checkpoint {location.checkpoint}"
    backward = " backward" if location.backward else ""
    return f" at {quoted(location.file)}:{location.line}{module}{stage}{checkpoint}{backward}"


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


def call_text(op: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]) -> str:
    """An op with its arguments: `aten.sum.dim_IntList(%x, [0], dtype=!dtype:float32)`."""
    shown = [argument_text(arg) for arg in args]
    shown += [f"{key}={argument_text(arg)}" for key, arg in kwargs]
    return f"{op}({', '.join(shown)})"


def phase_text(phase: Phase) -> str:
    """` {1 backward}`; nothing for the forward of stage 0."""
    return "" if phase == FORWARD else f" {phase}"


def taken_text(takes: UpdateBytes) -> str:
    """` takes [8, 4, 0]`: alone, left and together; nothing for updates that take no memory."""
    sizes = [takes.alone, takes.left, takes.together]
    return f" takes {sizes}" if any(sizes) else ""


def micro_text(micro_batches: int) -> str:
    """` micro 4` in the header of a graph or a rank's plan; nothing for one micro-batch."""
    return "" if micro_batches == 1 else f" micro {micro_batches}"


def tensor_text(shape: Sequence[int], dtype: str) -> str:
    """Shape and dtype: `float32[8, 16]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def layout_text(layout: Layout | None, placements: Sequence[Placement]) -> str:
    """` @0(S(0), B)`, or nothing for a value that has no layout yet."""
    if layout is None:
        return ""
    sbp = ", ".join(map(str, layout.sbp))
    return f" @{placements.index(layout.placement)}({sbp})"


def placement_lines(placements: Sequence[Placement]) -> list[str]:
    """The declarations at the top of a text."""
    return [f"placement @{index} = {placement}" for index, placement in enumerate(placements)]
