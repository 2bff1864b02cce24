"""The user's own step on one device, run by plain PyTorch: with live tensors as ordinary ones, and the plan's draws."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from weft.capture.batch import find_loss
from weft.capture.fx.generators import generators_followed
from weft.capture.fx.locations import checkpoints_noted
from weft.capture.fx.private import Decompositions, DispatchMode, Refusal
from weft.capture.ops import random
from weft.capture.ops.decompositions import decompositions
from weft.capture.optimizers.attributes import attributes_of
from weft.capture.tracing.mutations import mutations_undone
from weft.capture.tracing.replaced_tensors import tensors_replaced, write_replaced
from weft.capture.tracing.step_call import Casts
from weft.capture.tree import flatten, unflatten
from weft.errors import VerificationError
from weft.ir import LogicalGraph
from weft.ir.logical import Call
from weft.program.live.ownership import named_variables
from weft.program.live.variables import exchange, whole_of
from weft.program.planning.step import Step
from weft.program.verification.compare import Compared, Rounding, difference, largest
from weft.runtime.random import uniform


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain copies of tensors; collective."""
    return {key: whole_of(tensor) for key, tensor in tensors.items()}


@contextmanager
def ordinary_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the context, parameters and buffers have other values, whole, and are ordinary tensors.

    They are the same objects: whoever holds them, a closure, a list or an optimizer, computes with the values, and a
    step writes to these. Hooks of users stay on them.
    """
    tensors_replaced: list[_Lent] = []
    try:
        for key, own in tensors.items():
            tensors_replaced.append(_Lent(own, values[key]))
        yield
    finally:
        for each in reversed(tensors_replaced):
            each.give_back()


@final
class _Lent:
    """A tensor object that has another content until it is given back."""

    def __init__(self, own: Tensor, value: Tensor) -> None:
        content = value.detach()
        if isinstance(own, nn.Parameter):
            content = nn.Parameter(content, own.requires_grad)
        hooks = own._backward_hooks or {}
        theirs = attributes_of(own)
        self._own, self._content, self._hooks = own, content, own._backward_hooks
        exchange(own, content)
        vars(own).update(theirs)
        users = {key: hook for key, hook in hooks.items() if not hasattr(hook, "lays_gradient")}
        if users:
            own._backward_hooks = OrderedDict(users)

    def give_back(self) -> None:
        exchange(self._own, self._content)
        if self._hooks is not None:
            self._own._backward_hooks = self._hooks


@contextmanager
def states_lent(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, Mapping[str, Any]]
) -> Iterator[None]:
    """Within the context, an optimizer keeps other states; afterwards all of it is as it was."""
    own, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    optimizer.state = defaultdict(dict, {key: dict(value) for key, value in states.items()})
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


# For a draw: the size and the dtype.
_Draw = tuple[tuple[int, ...], torch.dtype]


def draws_of(graph: LogicalGraph) -> tuple[_Draw, ...]:
    """The draws of a captured step, in order."""
    calls = [call for call in graph.of_kind(Call) if call.op == "weft.uniform"]
    return tuple(
        (tuple(map(int, call.args[0])), getattr(torch, dict(call.kwargs)["dtype"].name))
        for call in calls
    )


@contextmanager
def drawn(draws: tuple[_Draw, ...], seed: int, step: int) -> Iterator[ReplayedDraws | None]:
    """Within the context, random ops draw the numbers of a step of the plan; nothing changes where it draws none."""
    if not draws:
        yield None
        return
    # Checkpoints run once, as they would draw again; attention draws its mask where it is seen.
    around = checkpoints_noted(), sdpa_kernel(SDPBackend.MATH), generators_followed()
    with around[0], around[1], around[2], ReplayedDraws(draws, seed, step) as mode:
        try:
            yield mode
        except Refusal as refusal:
            raise VerificationError(f"the plain eager step {refusal}") from refusal


@final
class ReplayedDraws(DispatchMode):  # type: ignore[no-untyped-call]
    """Random ops as capture writes them, with numbers of the plan's generator."""

    def __init__(self, draws: tuple[_Draw, ...], seed: int, step: int) -> None:
        super().__init__()
        self._draws = draws
        self._seed, self._step = seed, step
        self._next = self._others = 0

    @property
    def left(self) -> int:
        """The number of draws of the captured step that have not been made."""
        return len(self._draws) - self._next

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.weft.uniform.default:
            size = tuple(args[0])
            # The number of the draw in the captured step, which leaves out what nobody reads.
            if self.left and self._draws[self._next] == (size, kwargs["dtype"]):
                salt = self._next
                self._next += 1
            else:
                self._others += 1
                salt = -self._others
            return uniform(self._seed, self._step, size, [0] * len(size), size, salt, **kwargs)
        function = _random_ops().get(func)
        if function is not None:
            with self:
                made = function(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)


@cache
def _random_ops() -> Decompositions:
    """Ops that draw, and their backwards, as capture decomposes them."""
    functions = {id(each) for each in random.TABLE.values()}
    return {op: each for op, each in decompositions().items() if id(each) in functions}


# By kind ("output", "gradient", "buffer": parameters are among these) and name, in order.
Results: TypeAlias = "dict[tuple[str, str], Any]"


@final
@dataclass(frozen=True)
class PlainStep:
    """A step run by plain PyTorch: number `number` of a program, with its seed.

    `casts`: of the strategy's precision; each BatchNorm takes statistics of each of the `micro_batches`; `scale`: of
    the loss, with float16.
    """

    step: Step
    casts: Casts
    micro_batches: int = 1
    draws: tuple[Any, ...] = ()
    seed: int = 0
    number: int = 0
    scale: float = 1.0

    def run(self, values: Mapping[str, Tensor], batch: Any) -> Results:
        """One step, forward and backward, by whole values and a plain batch; nothing of the user is changed by it."""
        model, training = self.step.model, bool(self.step.optimizers)
        tensors = named_variables(model)
        values = {key: value.clone() for key, value in values.items()}
        devices = {x.device.index or 0 for x in values.values() if x.device.type == "cuda"}
        with (
            mutations_undone(model, self.step.loss_fn, everything=True),
            ordinary_tensors(tensors, values),
            torch.random.fork_rng(devices=sorted(devices)),
            _as_written(),
            _statistics_apart(self.micro_batches),
            torch.set_grad_enabled(training),
        ):
            if not training:
                model.eval()
            leaves, tree = flatten(batch, "batch")  # which the step may write to
            fresh = unflatten([x.clone() if isinstance(x, Tensor) else x for _, x in leaves], tree)
            with drawn(self.draws, self.seed, self.number) as mode:
                outputs = self._run(tensors, fresh)
            if mode is not None and mode.left:
                raise VerificationError(
                    f"the compiled step draws {mode.left} random tensors that a plain eager step does not draw, or "
                    "in another order; what it draws must not depend on what changes from call to call"
                )
            # Buffers may be other tensors now; in the places of parameters, casts may be.
            after = {**tensors, **dict(model.named_buffers())}
            found = {("output", path): x for path, x in outputs.items()}
            for key, x in tensors.items():
                if x.grad is not None:
                    found["gradient", key] = x.grad / self.scale
            return found | {("buffer", k): x.detach().clone() for k, x in after.items()}

    def _run(self, tensors: Mapping[str, Tensor], batch: Any) -> dict[str, Any]:
        """The forward and the backward; the leaves of what the loss function returned."""
        model = self.step.model
        with ExitStack() as stack:
            places: Sequence[Any] = ()
            if self.casts.parameters is not None:
                stand_ins = {
                    id(own): self.casts.parameter(own) if isinstance(own, nn.Parameter) else own
                    for own in tensors.values()
                }
                places = stack.enter_context(tensors_replaced(model, stand_ins))
            with self.casts.around(model):
                result = self.step.loss_fn(model, batch)
            if self.step.optimizers:
                loss = find_loss(result)
                loss.backward(torch.full_like(loss, self.scale))  # type: ignore[no-untyped-call]
            leaves, _ = flatten(result, "output")
            found = {path: x.detach().clone() if isinstance(x, Tensor) else x for path, x in leaves}
            if places:
                write_replaced(places, ())
        return found


@contextmanager
def _as_written() -> Iterator[None]:
    """Within the context, what the user compiled with `torch.compile` runs as it was written."""
    if "torch._dynamo.config" not in sys.modules:  # nothing was; it takes seconds to import
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _statistics_apart(parts: int) -> Iterator[None]:
    """Within the context, every BatchNorm takes statistics of each micro-batch, as accumulated steps do."""
    forward = _BatchNorm.forward

    def in_parts(norm: _BatchNorm, x: Tensor) -> Tensor:
        takes = norm.training or norm.running_mean is None
        if not takes or x.shape[0] % parts:
            return forward(norm, x)
        return torch.cat([forward(norm, part) for part in x.chunk(parts)])

    with patch.object(_BatchNorm, "forward", in_parts) if parts > 1 else nullcontext():
        yield


# The update of a plain step, by the user's own optimizer.
#
# It is given the gradients of the plan, which are compared before: an optimizer such as Adam makes
# of a gradient that is zero but for rounding an update as large as any. And it is given gradients a
# little larger and smaller, as far as rounding may move them, and between: what comes between is
# right. An update need not grow with its gradient, as Adam's second one does not.


# For the bounds, where updates are tried.
_PARTS = (*(1.0, 0.25, 0.05, 0.01), *(-1.0, -0.25, -0.05, -0.01))


@final
@dataclass(frozen=True)
class PlainUpdate:
    """An update by plain PyTorch: all tensors whole, by key.

    Attributes:
        tensors: the live parameters.
        values: before the update; of FP32 main parameters where there are any.
        bounds: how far rounding may move an element of each gradient.
        clip: the norm to which all gradients together are clipped.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Any]]
    gradients: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    clip: float | None

    def compared(
        self, tensors: Mapping[str, Tensor], states: Mapping[str, Any], by: Rounding
    ) -> Iterator[Compared]:
        """Compare new parameters, and states by `key.name`, of the plan with those of a plain update."""
        middle = self._run(0.0)
        low, high = dict(middle), dict(middle)
        for part in _PARTS:
            for name, each in self._run(part).items():
                if isinstance(each, Tensor) and isinstance(low.get(name), Tensor):
                    low[name] = torch.minimum(low[name], each)
                    high[name] = torch.maximum(high[name], each)
        for name in {**middle, **states}:
            kind = "parameter" if name in self.values else "state"
            found = tensors.get(name, states.get(name))
            expected = [each.get(name) for each in (middle, low, high)]
            yield _between(kind, name, found, expected, self.values.get(name), by)

    def _run(self, part: float) -> dict[str, Any]:
        """Parameters and states after an update by gradients that are moved by a part of their bounds."""
        own = {key: self.tensors[key] for key in self.gradients}
        values = {key: self.values[key].clone() for key in own}
        states = {
            own[key]: {name: _copy(x) for name, x in entries.items()}
            for key, entries in self.states.items()
            if key in own
        }
        with ExitStack() as tensors_replaced:
            tensors_replaced.enter_context(ordinary_tensors(own, values))
            for each in self.optimizers:
                tensors_replaced.enter_context(states_lent(each, states))
            for key, parameter in own.items():
                gradient = self.gradients[key] + part * self.bounds[key]
                parameter.grad = gradient.to(parameter.dtype)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(own.values(), self.clip)
            for each in self.optimizers:
                each.step()
            made: dict[str, Any] = {key: x.detach().clone() for key, x in own.items()}
            for key, parameter in own.items():
                for each in self.optimizers:
                    own_groups = (group["params"] for group in each.param_groups)
                    if any(parameter is one for every in own_groups for one in every):
                        kept = each.state.get(parameter, {})
                        made.update({f"{key}.{name}": _copy(x) for name, x in kept.items()})
        return made


def _between(
    kind: str,
    name: str,
    found: Any,
    every: list[Any],
    before: Tensor | None,
    by: Rounding,
) -> Compared:
    """Compare with what is between several expected values, of which the first is the middle."""
    expected = every[0]
    if not isinstance(expected, Tensor):
        differs = isinstance(found, Tensor) or found != expected
        text = f"is {found!r} in the plan, and {expected!r} in the plain step" if differs else ""
        return Compared(kind, name, text=text)
    if not isinstance(found, Tensor):
        return Compared(
            kind, name, text=f"is {found!r} in the plan, and a tensor in the plain step"
        )
    if found.shape != expected.shape:
        return Compared(
            kind,
            name,
            text=f"has shape {list(found.shape)}, and {list(expected.shape)} in the plain step",
        )
    if not expected.numel():
        return Compared(kind, name)
    # An FP32 main parameter is compared by way of its parameter.
    here = found.to(expected.device, torch.float64)
    rounded = torch.stack([x.to(found.dtype).to(torch.float64) for x in every])
    change = largest(expected) if before is None else difference(expected, before)
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    slack = 2 * eps * rounded.abs().amax(0).nan_to_num(nan=0.0, posinf=0.0) + by.of(change)
    outside = torch.maximum(rounded.amin(0) - slack - here, here - rounded.amax(0) - slack)
    same = (here == rounded[0]) | (here.isnan() & rounded[0].isnan())
    outside = torch.where(same, -slack, outside).nan_to_num(nan=float("inf"))
    worst = int(outside.argmax())
    apart = difference(here.flatten()[worst], rounded[0].flatten()[worst])
    allowed = max(apart - float(outside.flatten()[worst]), 0.0)
    return Compared(kind, name, apart, allowed, largest(expected))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
