"""Parts of segments in a form free of names: equal parts, such as those of repeated layers, share one kernel.

A part knows nothing of where its inputs come from, so the first and the last of the layers may
differ from the others only where a value leaves them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from weft.ir.nodes import FORWARD, Arg, Ref
from weft.ir.plan import LocalCall, LocalValue
from weft.ops.call import map_argument


@final
@dataclass(frozen=True, slots=True)
class Form:
    """The work of a part, free of names: equal parts have equal forms.

    Attributes:
        calls: with inputs named `i0, i1, …` and results `v0, v1, …`, in the order of appearance.
        inputs: the names of the inputs.
        outputs: the names of the values that are needed outside.
    """

    calls: tuple[LocalCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A run of calls in the names of its program: `inputs` and `outputs` stand in the order of the form's."""

    form: Form
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def part_of(calls: Sequence[LocalCall], needed: Collection[str]) -> Part:
    """A run of calls as a part.

    Args:
        calls: in the order in which they run.
        needed: names of values that are read outside of the run.
    """
    names: dict[str, str] = {}
    inputs: list[str] = []
    made: dict[str, None] = {}
    written = []
    for call in calls:
        for name in call.uses:
            if name not in names:
                names[name] = f"i{len(inputs)}"
                inputs.append(name)
        for value in call.makes:
            names[value.name] = f"v{len(made)}"
            made[value.name] = None
        written.append(_renamed(call, names))
    outputs = tuple(name for name in made if name in needed)
    named = tuple(names[name] for name in inputs), tuple(names[name] for name in outputs)
    return Part(Form(tuple(written), *named), tuple(inputs), outputs)


def _renamed(call: LocalCall, names: Mapping[str, str]) -> LocalCall:
    def leaf(arg: Arg) -> Arg:
        return Ref(names[arg.name]) if isinstance(arg, Ref) else arg

    return LocalCall(
        call.op,
        map_argument(leaf, call.args),
        tuple((key, map_argument(leaf, arg)) for key, arg in call.kwargs),
        tuple(
            value and LocalValue(names[value.name], value.shape, value.dtype)
            for value in call.outputs
        ),
        FORWARD,
    )
