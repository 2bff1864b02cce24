"""Ops that write: run as functions, and their results written into the local tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.capture.decompositions import overwrites
from weft.errors import LayoutError, UserError
from weft.tensor.boxing import box
from weft.tensor.divergence import user_line
from weft.tensor.operands import common_mesh
from weft.tensor.views import check_writable


def in_place(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose first argument is written, such as `add_`.

    Raises:
        UserError: for ops that write elsewhere (`out=`), or a result of another shape.
        LayoutError: when the written tensor is plain, or a view that could not share its base's
            memory.
    """
    target = args[0] if args else None
    common_mesh(kind, op, [value for value in args if isinstance(value, Tensor)])
    if not isinstance(target, kind):
        raise LayoutError(f"{user_line()}: {op} cannot write a global tensor into a plain one")
    made = _functional(op)(*args, **kwargs)
    if not isinstance(made, kind):  # of a plain scalar
        made = torch.zeros_like(target) + made
    write(target, made)
    return target


def write(target: Any, made: Any) -> None:
    """Write the value of one global tensor into the memory of another."""
    if made.shape != target.shape:
        raise UserError(
            f"{user_line()}: a result of shape {list(made.shape)} cannot be written into {target.spec}"
        )
    check_writable(target)
    _, own = box(made.spec, made.locals, target.spec.layout, target.spec.mesh, implicit="a write")
    for old, new in zip(target.locals, own, strict=True):
        old.copy_(new)


def fused_update(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer's update, element by element: each rank updates its parts.

    The first list are the parameters, the second their gradients, which are brought to the layout
    of the parameters; every other list of global tensors holds states, which must lie so already.
    """
    parameters, gradients, *others = args
    boxed = [
        _as(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    for states in others:
        if isinstance(states, list | tuple):
            _check_states(kind, op, parameters, states)
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
    return None


def _as(parameter: Any, gradient: Any) -> tuple[Tensor, ...]:
    if not hasattr(parameter, "spec") or not hasattr(gradient, "spec"):
        raise LayoutError(
            f"{user_line()}: a fused optimizer takes all global or all plain tensors in one group; make the model's "
            "parameters global with weft.distribute"
        )
    spec, layout = gradient.spec, parameter.spec.layout
    return box(spec, gradient.locals, layout, parameter.spec.mesh, implicit="a fused update")[1]


def _check_states(kind: Any, op: Any, parameters: Any, states: Any) -> None:
    for parameter, state in zip(parameters, states, strict=False):
        if isinstance(state, kind) and state.spec.layout != parameter.spec.layout:
            raise LayoutError(
                f"{user_line()}: {op} updates {parameter.spec} with a state that lies as {state.spec.layout}; bring it "
                "to the parameter's layout with to_global, or use fused=False"
            )


def _functional(op: Any) -> Any:
    """The op that makes a new tensor instead of writing."""
    name, overload = op._schema.name.partition("::")[2], op._overloadname
    if not name.endswith("_") or "out" in overload.split("_"):
        raise UserError(
            f"{user_line()}: {op} writes into an argument, which global tensors support for methods such as add_ only; "
            "use the form that returns its result"
        )
    packet = getattr(getattr(torch.ops, op.namespace), name[:-1], None)
    function = getattr(packet, overload, None)
    if function is None:
        raise UserError(f"{user_line()}: {op} has no form that returns its result")
    return overwrites().get(function, function)
