"""Ops that write: run as functions, and their results written into the local tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.ops.decompositions import overwrites
from weft.errors import LayoutError, UserError
from weft.tensor.dispatch.interleaved import (
    InterleavedOrigin,
    base_of,
    change_layout,
    living_copies,
    stand_in,
)
from weft.tensor.dispatch.operands import all_global, common_mesh, run_on_whole_copies
from weft.tensor.divergence import user_line


def in_place(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that writes arguments, such as `add_` or any `out=`: its results are computed, then written.

    Raises:
        UserError: for a result of another shape, or a dtype that cannot be cast to the written one.
        LayoutError: when a written tensor is plain, or a view that could not share its base's
            memory.
    """
    names, written, outs = _arguments(op)
    named = dict(zip(names, args, strict=False)) | kwargs
    targets = [named[name] for name in written]
    every = [x for one in targets for x in (one if isinstance(one, list | tuple) else (one,))]
    if not all(isinstance(target, kind) for target in every):
        raise LayoutError(
            f"{user_line()}: {op} cannot write a global tensor into a plain one; {_advice(op)}"
        )
    others = [x for x in named.values() if isinstance(x, Tensor)]
    mesh = common_mesh(kind, op, [*every, *others])
    form = functional_form(op)
    if form is not None:
        made = form({name: x for name, x in named.items() if name not in outs})
    else:
        made = _on_copies(kind, op, named, written)
    made = all_global(kind, mesh, made)
    # Beside the written values, an op may return others.
    listed = isinstance(made, list | tuple)
    alone = len(targets) == 1 and (not listed or isinstance(targets[0], list | tuple))
    values = [made] if alone else made[-len(targets) :]
    own = () if alone else made[: -len(targets)]
    if torch.Tag.inplace_view in op.tags:
        targets[0].become(values[0])
    else:
        _write_all(op, targets, values)
    found = (*own, *(targets if len(own) < len(op._schema.returns) else ()))
    if not found:
        return None
    return found[0] if len(found) == 1 else found


def _advice(op: Any) -> str:
    if "_amp_" in op.name():
        return (
            "torch.amp.GradScaler takes ordinary gradients only. Steps of a program scale the loss themselves, with "
            'Strategy(precision=weft.Precision(compute="fp16")); eager code may use bf16, which needs no scale'
        )
    return (
        "give it the whole value, x.full(), which every process must call, or make the plain tensor global; averages "
        "and copies of a compiled model (AveragedModel, copy.deepcopy) are made after weft.compile"
    )


@cache
def _arguments(op: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of all arguments, of those that the op writes, and of those that are `out=`."""
    every = op._schema.arguments
    written = [a.name for a in every if a.alias_info is not None and a.alias_info.is_write]
    return [a.name for a in every], written, [a.name for a in every if a.is_out]


def _on_copies(kind: Any, op: Any, named: dict[str, Any], written: Sequence[str]) -> Any:
    """The values that an op without a form that returns them writes, of the op itself on whole copies."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise UserError(
            f"{user_line()}: {op} has no form that returns its result, and would draw others on each rank; "
            "draw into a new tensor by torch.rand and the like, and copy it with copy_"
        )

    def run(**copies: Any) -> Any:
        op(**copies)
        return [copies[name] for name in written]

    return run_on_whole_copies(kind, op, (), named, run)


def _write_all(op: Any, targets: Sequence[Any], made: Sequence[Any]) -> None:
    for target, value in zip(targets, made, strict=True):
        if isinstance(target, list | tuple):
            _write_all(op, target, value)
        elif not torch.can_cast(value.dtype, target.dtype):
            raise UserError(
                f"{user_line()}: {op} makes {value.dtype}, which cannot be cast to the {target.dtype} that it writes; "
                "use the form that returns its result, or cast the operands"
            )
        elif not target.numel() and target.shape != value.shape:
            target.become(value.to(target.dtype))
        else:
            write(target, value)


def write(target: Any, made: Any) -> None:
    """Write the value of one global tensor into the memory of another."""
    if made.shape != target.shape:
        raise UserError(
            f"{user_line()}: a result of shape {list(made.shape)} cannot be written into {target.spec}; "
            "write a tensor of its shape, or make a new one"
        )
    if any(
        size > 1 and not stride
        for part in target.locals
        for size, stride in zip(part.shape, part.stride(), strict=True)
    ):
        # Like torch says it, which would find it out in the midst of the write.
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    origin = getattr(target, "origin", None)
    if origin is not None:
        write(origin.source, origin.written(made))
        if isinstance(origin, InterleavedOrigin):  # a stand-in for one op follows no writes
            _set(target, made)
        return
    _set(target, made)
    for copy in living_copies(base_of(target)):
        view = copy()
        if view is not None:
            _set(view, view.origin.view(view.origin.source))


def _set(target: Any, made: Any) -> None:
    there = target.spec
    _, own = change_layout(
        made.spec, made.locals, there.layout, there.mesh, made.shares, target.shares, "a write"
    )
    for old, new in zip(target.locals, own, strict=True):
        old.copy_(new)
        _count(old)


def _count(part: Tensor) -> None:
    """Increment the version of a written local tensor, which torch does only above dispatch.

    So the backward of code that used the part, by `to_local` or `shards`, detects the write.
    """
    if not part.is_inference():
        torch.autograd.graph.increment_version(part)


def other_memory(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`set_`, which torch's parametrizations call on parameters: no global tensor takes another memory."""
    raise UserError(
        f"{user_line()}: {op} would give {getattr(args[0], 'spec', 'a tensor')} the memory of another tensor; write "
        "values with copy_. To change the modules of a compiled model, as register_parametrization does, close its "
        "programs, call weft.release(model), and compile again after the change"
    )


def resized(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`resize_` and `resize_as_`: the same elements in another shape; new ones, on which nobody may rely, are 0."""
    target, given = args[0], args[1]
    size = tuple(given.shape if isinstance(given, Tensor) else given)
    if not target.is_contiguous() or target._is_view():
        raise UserError(
            f"{user_line()}: {op} of {target.spec}, which is a view or not contiguous, would reach memory of others; "
            "make a new tensor instead"
        )
    missing = math.prod(size) - target.numel()
    flat = target.detach().reshape(-1)
    flat = torch.cat([flat, flat.new_zeros(missing)]) if missing > 0 else flat[: math.prod(size)]
    target.become(flat.reshape(size).clone())
    return target


def fused_update(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer's update, element by element: each rank updates its parts.

    The first list are the parameters, the second their gradients, which are brought to the layout
    of the parameters; every other list of global tensors holds states, which must be laid out so already.
    """
    of = [parameter.spec.mesh for parameter in args[0] if isinstance(parameter, kind)]
    if len(set(of)) > 1:
        for mesh in dict.fromkeys(of):
            places = [place for place, each in enumerate(of) if each is mesh]
            fused_update(kind, op, *_of_places(places, args, kwargs))
        return
    # Parameters some of whose states are stored in other shares are updated by ordered copies, one by one.
    every = [x for x in (*args[2:], *kwargs.values()) if isinstance(x, list) and x]
    mixed = [
        place
        for place, parameter in enumerate(args[0])
        if any(
            x.dim() and getattr(x, "shares", None) != getattr(parameter, "shares", None)
            for x in (states[place] for states in every)
        )
    ]
    for place in mixed:
        _update_in_order(kind, op, *_of_places([place], args, kwargs))
    rest = [place for place in range(len(args[0])) if place not in mixed]
    if rest:
        _update_parts(kind, op, *_of_places(rest, args, kwargs))


def _update_parts(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters, gradients, *others = args
    boxed = [
        _as(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    for states in others:
        pairs = zip(parameters, states, strict=False) if isinstance(states, list | tuple) else ()
        for parameter, state in pairs:
            lies = isinstance(state, kind) and state.dim()
            if lies and state.spec.layout != parameter.spec.layout:
                raise LayoutError(
                    f"{user_line()}: {op} updates {parameter.spec} with a state that is laid out as "
                    f"{state.spec.layout}; bring it to the parameter's layout with to_global, or use fused=False"
                )
    ranks = len(parameters[0].locals)
    for place in range(ranks):

        def local(value: Any, place: int = place) -> Any:
            if isinstance(value, list | tuple):
                return [local(part) for part in value]
            return value.locals[place] if isinstance(value, kind) else value

        given = [own[place] for own in boxed]
        op(
            local(parameters),
            given,
            *map(local, others),
            **{k: local(v) for k, v in kwargs.items()},
        )
        for part in local(parameters):
            _count(part)


def _of_places(
    places: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a fused update for some of its parameters; every list has an entry for each, or none."""

    def own(value: Any) -> Any:
        return [value[i] for i in places] if isinstance(value, list) and value else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}


def _update_in_order(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A fused update of one parameter, by ordered copies of what is stored in shares."""
    made: dict[int, Any] = {}

    def seen(value: Any) -> Any:
        if isinstance(value, kind) and value.shares is not None:
            return made.setdefault(id(value), stand_in(value, str(op)))
        return value

    fused_update(kind, op, pytree.tree_map(seen, args), pytree.tree_map(seen, kwargs))
    for each in made.values():
        write(each.origin.source, each)


def _as(parameter: Any, gradient: Any) -> tuple[Tensor, ...]:
    if not hasattr(parameter, "spec") or not hasattr(gradient, "spec"):
        raise LayoutError(
            f"{user_line()}: a fused optimizer takes all global or all plain tensors in one group; make the model's "
            "parameters global with weft.distribute"
        )
    spec, there = gradient.spec, parameter.spec
    return change_layout(
        spec,
        gradient.locals,
        there.layout,
        there.mesh,
        gradient.shares,
        parameter.shares,
        "a fused update",
    )[1]


@cache
def functional_form(op: Any) -> Callable[[dict[str, Any]], Any] | None:
    """The function of the named arguments that gives what `op` writes; None if no op with those returns it."""
    name = op._schema.name.partition("::")[2]
    if not any(argument.is_out for argument in op._schema.arguments):
        # Without the mark that the op writes: `add_` is `add`, `__iand__` is `__and__`.
        plain = name[:-1] if name.endswith("_") else f"{name}_functional"
        name = f"__{name[3:]}" if name.startswith("__i") else plain
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    for overload in packet.overloads() if packet is not None else ():
        function = getattr(packet, overload)
        if not function._schema.is_mutable and _taken(function) == _taken(op):
            return _by_name(function)
    return None


def _by_name(function: Any) -> Callable[[dict[str, Any]], Any]:
    """Call `function`, or its stand-in, with arguments by name."""
    order = [argument.name for argument in function._schema.arguments if not argument.kwarg_only]
    run = overwrites().get(function, function)

    def call(named: dict[str, Any]) -> Any:
        count = next((i for i, name in enumerate(order) if name not in named), len(order))
        rest = {name: value for name, value in named.items() if name not in order[:count]}
        return run(*[named[name] for name in order[:count]], **rest)

    return call


def _taken(op: Any) -> set[tuple[str, str]]:
    return {(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out}
