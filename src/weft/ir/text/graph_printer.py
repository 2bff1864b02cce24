"""Text of a node; `weft.ir.parsers.graph_parser` reads it back to an equal node."""

from __future__ import annotations

from collections.abc import Sequence

from weft.ir.nodes import Box, Call, Hint, Input, Location, Node, Output, Update, Value
from weft.ir.text.written import call_text, layout_text, phase_text, quoted, taken_text, tensor_text
from weft.layout import Placement


def node_text(node: Node, placements: Sequence[Placement]) -> str:
    """One node on one line; a layout's placement must stand in `placements`."""
    match node:
        case Input(value=value, role=role, key=key):
            order = f" {node.shares}" if node.shares else ""
            how = (" cut" if node.cut else "") + (f" sent {node.sent}" if node.sent else "")
            return f"%{value.name} = {role} {quoted(key)}{order}{how} : {_type_text(value, placements)}"
        case Call(op=op, args=args, kwargs=kwargs, outputs=outputs, location=location):
            names = ", ".join("_" if value is None else f"%{value.name}" for value in outputs)
            types = ", ".join("_" if v is None else _type_text(v, placements) for v in outputs)
            pair = "" if node.autograd is None else f" #{node.autograd}"
            after = _hint_text(node.hint) + phase_text(node.phase) + pair + _location_text(location)
            return f"{names} = call {call_text(op, args, kwargs)} : {types}{after}"
        case Box(input=ref, output=output, cause=cause):
            because = f" for {quoted(cause)}" if cause else ""
            return f"%{output.name} = box %{ref.name} : {_type_text(output, placements)}{because}"
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


def _type_text(value: Value, placements: Sequence[Placement]) -> str:
    return tensor_text(value.shape, value.dtype) + layout_text(value.layout, placements)


def _location_text(location: Location | None) -> str:
    if location is None:
        return ""
    module = f" in {quoted(location.module)}" if location.module else ""
    stage = "" if location.stage is None else f" stage {location.stage}"
    checkpoint = "" if location.checkpoint is None else f" checkpoint {location.checkpoint}"
    backward = " backward" if location.backward else ""
    return f" at {quoted(location.file)}:{location.line}{module}{stage}{checkpoint}{backward}"
