"""Find repeated layers in a list of local calls, and write equal parts in one form.

Parts that do the same in the same order, such as the layers of a transformer, share one compiled
kernel: compile time grows with the number of distinct layers. A part knows nothing of where its
inputs come from, so the first and the last of the layers may differ from the others only where a
value leaves them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir.nodes import FORWARD, Arg, Ref
from weft.ir.plan import LocalCall, LocalValue
from weft.ops.call import map_argument

# Repeats with fewer calls are taken together until they have as many: what a kernel costs by itself
# is about that of a few small ops, and nothing is fused across its border.
FEWEST = 24
# How many later places with an equal call are tried as the beginning of a second copy.
TRIED = 48


@dataclass(frozen=True, slots=True)
class Form:
    """What a part does, free of names: equal parts have equal forms.

    Attributes:
        calls: with inputs named `i0, i1, …` and results `v0, v1, …`, in the order of appearance.
        inputs: the names of the inputs.
        outputs: the names of the values that are needed outside.
    """

    calls: tuple[LocalCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of calls in the names of its program: `inputs` and `outputs` stand in the order of the form's."""

    form: Form
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def repeats(calls: Sequence[LocalCall], fewest: int = FEWEST) -> list[int]:
    """The places before which to cut, so that equal stretches of calls become equal parts.

    Args:
        calls: all local calls of a rank, in the order in which they run.
        fewest: the calls of a part, at least, where repeats are long enough.

    Returns:
        Increasing places inside of the list, where a repeat begins or ends.
    """
    numbers: dict[Hashable, int] = {}
    marks = [numbers.setdefault(_mark(call), len(numbers)) for call in calls]
    later: defaultdict[int, list[int]] = defaultdict(list)
    for place, mark in enumerate(marks):
        later[mark].append(place)
    cuts: list[int] = []
    place = 0
    while place < len(marks):
        period, copies = _repeat(marks, place, later[marks[place]])
        if period * copies < 2 * fewest:
            place += 1
            continue
        together = min(copies, -(-fewest // period))
        end = place + period * copies
        cuts += [*range(place, end, period * together), end]
        place = end
    return [cut for cut in dict.fromkeys(cuts) if 0 < cut < len(calls)]


def _repeat(marks: Sequence[int], place: int, equal: Sequence[int]) -> tuple[int, int]:
    """The (period, copies) of the longest stretch from `place` on that repeats; (1, 1) without one.

    Args:
        marks: of all calls.
        place: where it begins.
        equal: all places of the mark at `place`, increasing.
    """
    best = (1, 1)
    tried = [other - place for other in equal if other > place][:TRIED]
    for period in tried:
        if best[1] > 1 and (period % best[0] == 0 or 2 * period > len(marks) - place):
            continue
        copies = 1 + _matching(marks, place, period) // period
        if copies > 1 and period * copies > best[0] * best[1]:
            best = (period, copies)
    return best


def _matching(marks: Sequence[int], place: int, period: int) -> int:
    """How many marks from `place` on equal the ones `period` later."""
    end = place
    while end + period < len(marks) and marks[end] == marks[end + period]:
        end += 1
    return end - place


def _mark(call: LocalCall) -> Hashable:
    """What two calls have in common whatever they read: op, constants, shapes and dtypes of results."""
    made = tuple(value and (value.shape, value.dtype) for value in call.outputs)
    return (call.op, _nameless(call.args), _nameless(call.kwargs), made)


def _nameless(arg: Arg) -> Hashable:
    return _typed(map_argument(lambda leaf: Ref if isinstance(leaf, Ref) else leaf, arg))


def _typed(arg: object) -> Hashable:
    """An argument that equals no other of another type: 1, 1.0 and True differ."""
    return tuple(map(_typed, arg)) if isinstance(arg, tuple) else (type(arg), arg)


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
