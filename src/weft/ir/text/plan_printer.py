"""Text of plans; `weft.ir.parsers.plan_parser` reads it back to an equal plan."""

from __future__ import annotations

from collections.abc import Iterable

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
from weft.ir.text.written import (
    argument_text,
    call_text,
    phase_text,
    quoted,
    taken_text,
    tensor_text,
)


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
            how = _acts_text(actor) + _segment_text(actor)
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


def _segment_text(actor: Compute) -> str:
    """The way in which a segment runs, as text, where not just as its nodes."""
    copies = f" copies [{_names(actor.copies)}]" if actor.copies else ""
    parts = f" parts {argument_text(actor.parts)}" if actor.parts else ""
    return copies + parts + (" replayed" if actor.replayed else "")


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
