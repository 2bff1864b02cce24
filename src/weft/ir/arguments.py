"""The arguments of a call: trees with names of values, and facts found in them, once for all copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, final

from weft.cached import cached_property
from weft.ops.call import Argument, OpCall, Token, map_argument, operand
from weft.ops.call import Varying as Varying


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called `name`."""

    name: str


# A node of an argument tree: like `weft.ops.call.Argument`, with `Ref` in place of numbered
# operands.
Arg: TypeAlias = (
    "Ref | Token | Varying | bool | int | float | complex | str | None | tuple[Arg, ...]"
)


class Arguments:
    """The contents of a call's argument trees; a call never changes, so that each is walked once.

    Copies with the same arguments, or with other names in them, share what was found (`changed`, `with_names`).
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The names of the values that the call reads, in order, repeated as they stand."""
        if not self.kwargs:
            return tuple(refs(self.args))
        return (*refs(self.args), *(name for _, arg in self.kwargs for name in refs(arg)))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The distinct values that the call reads, in the order of first appearance."""
        return tuple(dict.fromkeys(self.uses))

    @cached_property
    def numbered(self) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """`args` and `kwargs` with the numbers of operands in place of their names."""
        number = {name: operand(index) for index, name in enumerate(self.operands)}

        def leaf(arg: Any) -> Any:
            return number[arg.name] if isinstance(arg, Ref) else arg

        kwargs = tuple((key, map_argument(leaf, arg)) for key, arg in self.kwargs)
        return map_argument(leaf, self.args), kwargs

    @cached_property
    def varyings(self) -> tuple[Varying, ...]:
        """The arguments that differ between micro-batches, in order."""
        return tuple(varyings((self.args, *(arg for _, arg in self.kwargs))))

    @cached_property
    def rule_calls(self) -> list[OpCall]:
        """The calls that sharding rules have seen in this one so far, for the shapes of its tensors."""
        return []


_AnyCall = TypeVar("_AnyCall", bound=Arguments)


def changed(call: _AnyCall, **fields: Any) -> _AnyCall:
    """A call with other fields than `op`, `args` and `kwargs`; what was found of its arguments goes along."""
    copy: _AnyCall = replace(call, **fields)  # type: ignore[type-var]
    _share(call, copy, _OF_ARGUMENTS)
    return copy


def with_names(call: _AnyCall, names: Mapping[str, str]) -> _AnyCall:
    """A call that reads other values: new names by old ones. It may be the same one."""
    uses = tuple([names.get(name, name) for name in call.uses])
    if uses == call.uses:
        return call
    kwargs = tuple([(key, _renamed(arg, names)) for key, arg in call.kwargs])
    copy: _AnyCall = replace(call, args=_renamed(call.args, names), kwargs=kwargs)  # type: ignore[type-var]
    copy.__dict__["uses"] = uses
    if len(copy.operands) == len(call.operands):  # each has the number that it had
        _share(call, copy, _OF_NUMBERS)
    return copy


def _share(call: Arguments, copy: Arguments, names: tuple[str, ...]) -> None:
    """Give a copy what was found of a call, and what its arguments will be found to be."""
    known = call.__dict__
    copy.__dict__.update({name: known[name] for name in names if name in known})
    copy.__dict__["rule_calls"] = call.rule_calls


# What `Arguments` finds: of the argument trees alone, and of those with numbers in place of names.
_OF_NUMBERS = ("numbered", "varyings")
_OF_ARGUMENTS = ("uses", "operands", *_OF_NUMBERS)


def _renamed(arg: Any, names: Mapping[str, str]) -> Any:
    if isinstance(arg, Ref):
        return Ref(names[arg.name]) if arg.name in names else arg
    if isinstance(arg, tuple):
        return tuple([_renamed(part, names) for part in arg])
    return arg


def varyings(arg: Any) -> Iterator[Varying]:
    """The arguments in a tree that differ between micro-batches, in order."""
    if isinstance(arg, Varying):
        yield arg
    elif isinstance(arg, tuple):
        for part in arg:
            yield from varyings(part)


def refs(arg: Any) -> Iterator[str]:
    """The names of all values in an argument tree, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for part in arg:
            if isinstance(part, Ref):  # most of what there is: without a generator of its own
                yield part.name
            elif isinstance(part, tuple):
                yield from refs(part)
