"""Step: what is to be trained, captured once for all strategies; guards, which are compared before every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, is_, ne
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from weft.capture import Captured, capture
from weft.capture.batch import describe_batch
from weft.capture.optimizer_groups import Optimizers, Optimizing, optimizers_of
from weft.capture.optimizers.attributes import is_foreign
from weft.capture.python.hooks import Hooks
from weft.capture.python.symbolic import can_follow
from weft.capture.python_guards import Guard
from weft.capture.tree import Static
from weft.compiler.strategy_hints import split_parameters
from weft.errors import UserError
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep
from weft.program.agreement import LEAF
from weft.program.checksums import checksums, is_checked_step
from weft.program.data.feed import WholeBatch, layouts_of_shards
from weft.program.live.variables import unwrap_model
from weft.runtime.executor.rank_executor import RankExecutor
from weft.strategy.precision import Precision, precision_of
from weft.strategy.strategy import Strategy
from weft.tensor import GlobalTensor

# The inputs of a step's graph, as text.
_Facts: TypeAlias = tuple[str, ...]


@final
@dataclass(frozen=True)
class _CaptureFor:
    """A capture, and what it was made for."""

    device_type: str
    precision: Precision
    apart: frozenset[str]
    captured: Captured
    guards: Guards

    def serves(self, device_type: str, precision: Precision, apart: frozenset[str]) -> bool:
        """True if another strategy would capture the same."""
        differs = (self.apart ^ apart) & self.captured.recurrent
        return (self.device_type, self.precision) == (device_type, precision) and not differs


@final
class Step:
    """One training or evaluation step of an ordinary model, for `weft.compile` with one strategy after another.

    The step is captured when a strategy first needs it; strategies that need another capture
    (another precision or device type, weights of recurrent layers in pieces) get one of their own,
    and all are kept while the values of Python that the model reads, such as a number in an
    attribute, and its hooks are what they were. A program takes the model over until it is closed; then the next
    one may lay it out otherwise.

    Args:
        model: as `weft.compile` takes it.
        loss_fn: of the model and a batch.
        optimizer: of the model's parameters, or several; None for an evaluation step.
        example_batch: a nest of tensors of the whole batch's shapes and dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Any],
        optimizer: Optimizing,
        example_batch: Any,
    ) -> None:
        self.model = unwrap_model(model)
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.example_batch = example_batch
        self.optimizers = optimizers_of(optimizer)
        self._batch = WholeBatch(example_batch).nest
        # How leaves of the example are laid out that are global tensors.
        self.leaves = layouts_of_shards(example_batch)
        self._known: list[_CaptureFor] = []
        # The same step for other shapes, whose captures make those of this one faster.
        self._like: Step | None = None
        # Where numbers of Python stand that have changed since a capture; for other shapes too.
        self._changing: dict[tuple[int, Any], Guard] = {}
        self._facts: _Facts | None = None
        # The batch's entries other than tensors, as they are now; for other shapes too.
        self._constants: dict[str, Any] = {}

    @property
    def captures(self) -> tuple[Captured, ...]:
        """The captures so far, in the order in which they were made."""
        return tuple(known.captured for known in self._known)

    def captured(
        self,
        device_type: str = "cpu",
        precision: Precision | None = None,
        apart: Collection[str] = (),
    ) -> Captured:
        """The step as one graph on whole tensors; captured now if it was not yet.

        Args:
            device_type: where it will run: "cpu" or "cuda".
            precision: of the step; the dtypes of its sums do not matter here.
            apart: names of parameters that will be in pieces.

        Raises:
            CaptureError: the step cannot be one graph; names the user's line.
            UserError: model or optimizer have changed since the first capture; names the change.
        """
        facts = self.facts()
        if self._facts is None:
            self._facts = facts
        if facts != self._facts:
            old, new = (dict(fact.split(": ", 1) for fact in x) for x in (self._facts, facts))
            changed = (name for name in {**old, **new} if old.get(name) != new.get(name))
            name = next(changed, "the order of parameters")
            raise UserError(
                f"the model or the optimizer has changed since the step was captured: {name} was "
                f"{old.get(name, 'not there')!r} and is {new.get(name, 'not there')!r}; change it back, or make a "
                "new weft.Step"
            )
        wanted = device_type, (precision or Precision()).captured, frozenset(apart)
        # Another value of a number that the model reads makes another graph, as another hook does.
        describe_batch(self._batch, self._constants)
        self._known = [known for known in self._known if not known.guards.changed()]
        found = next((known for known in self._known if known.serves(*wanted)), None)
        if found is None:
            known = self._like._known if self._like else []
            like = next((each.captured for each in known if each.serves(*wanted)), None)
            _, chosen, apart = wanted
            with uncollected():
                captured = capture(
                    *(self.model, self.loss_fn, self.optimizers, self._batch, device_type),
                    training=bool(self.optimizers),
                    precision=chosen.compute,
                    apart=apart,
                    parameters=chosen.parameters,
                    masters=chosen.masters,
                    like=like,
                    changing=self.changing,
                    constants=self._constants,
                )
            guards = Guards(captured, self.model, self.optimizers)
            found = _CaptureFor(*wanted, captured, guards)
            self._known.append(found)
        return found.captured

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """The captured step, for plans on other machines, as `Job.stored`; captured now if it was not yet."""
        if self.leaves:
            raise UserError(
                f"the leaf {next(iter(self.leaves))!r} of the example batch is a weft.GlobalTensor; a step that is "
                "planned elsewhere takes ordinary tensors of the whole batch's shapes"
            )
        planned = strategy or Strategy()
        precision = (precision_of(planned.precision) or Precision()).captured
        apart = split_parameters(planned, dict(self.model.named_parameters()))
        captured = self.captured(device_type, precision, apart)
        paths = (path for path, _ in self.model.named_modules(remove_duplicate=False) if path)
        return StoredStep(
            captured.graph,
            device_type,
            precision,
            apart & captured.recurrent,
            captured.recurrent,
            tuple(paths),
            tuple(type(one).__name__ for one in self.optimizers.each),
            str(torch.__version__),
            StoredStep.rules_of(captured.graph),
        )

    def facts(self) -> _Facts:
        """The facts of model and optimizers as they are now that the graph depends on, "name: value" each."""
        return tuple(_facts(self.model, self.optimizers))

    @property
    def changing(self) -> list[Guard]:
        """The numbers of Python that are inputs of the step where they can be, as they are now."""
        return [replace(each, value=each.value_now) for each in self._changing.values()]

    def follow(self, numbers: Iterable[Guard]) -> None:
        """Take numbers of Python for inputs of the step from the next capture on, where they can be."""
        self._changing |= {each.key: each for each in numbers}

    def now(self) -> Step:
        """The step for the present model and optimizers: this one while nothing has changed."""
        if self._facts in (None, self.facts()):
            return self
        anew = self.of_shape(self._batch)
        anew.leaves = self.leaves
        return anew

    def of_shape(self, batch: Any) -> Step:
        """The same step for a batch of other shapes."""
        step = Step(self.model, self.loss_fn, self.optimizer, batch)
        step._like = self._like or self
        step._changing, step._constants = self._changing, self._constants
        return step


def _facts(model: nn.Module, optimizers: Optimizers) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        trained = "trained" if parameter.requires_grad else "not trained"
        yield f"parameter {name}: {_text(parameter)}, {trained}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name}: {_text(buffer)}"
    # Evaluation sets all modules to eval mode itself.
    for path, module in model.named_modules() if optimizers else ():
        yield f"module {path or type(module).__name__}: {'train' if module.training else 'eval'} mode"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for label, number, group in optimizers.groups():
        members = ", ".join(names.get(id(one), "unknown") for one in group["params"])
        yield f"{label}: {members}"
        for key, value in _decisive(group, optimizers.place(number)[0]):
            if isinstance(value, torch.Tensor):
                shown = type(value).__name__
            elif value is None or isinstance(value, bool | str):
                shown = repr(value)
            else:  # whether there is a momentum decides which states there are, not how large it is
                shown = f"{'not ' if value else ''}0"
            yield f"option {key} of {label}: {shown}"


def _decisive(
    group: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:
    """The options of a group of an optimizer that may decide what its update is, by more than a number in it."""
    if is_foreign(optimizer):  # a number there may be a counter
        found = {key: value for key, value in group.items() if type(value) not in (int, float)}
    else:  # others are notes of schedulers, such as initial_lr; and a warm-up may begin at a rate of 0
        found = {key: group[key] for key in optimizer.defaults if key in group and key != "lr"}
    yield from ((key, value) for key, value in found.items() if key != "params")


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@final
@dataclass(frozen=True)
class Job:
    """A step to plan elsewhere: the arguments of `weft.compile`, without placement and strategy.

    Attributes:
        model: any module; on the meta device it takes no memory.
        loss_fn: `loss_fn(model, batch)` returns the loss, alone, first of a tuple or as the entry "loss" of
            a dict.
        optimizer: of the model's parameters; a list of several; None for an evaluation step.
        example_batch: a nest of tensors with the shapes and dtypes of the whole batch, of all ranks
            together; also on the meta device.
    """

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Any]
    optimizer: Optimizing = None
    example_batch: Any = None

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """Capture the step, for plans on other machines.

        Args:
            device_type: where it will run: "cpu" or "cuda".
            strategy: it will be planned with: the step depends on its precision, and on which parameters of recurrent
                layers it splits.

        Raises:
            CaptureError: the step cannot be one graph; names the user's line.
            UserError: the batch holds global tensors, or a rule of an op is no plain data.
        """
        return Step(self.model, self.loss_fn, self.optimizer, self.example_batch).stored(
            device_type, strategy
        )


def asked_of_step(step: Step) -> dict[str, str]:
    """Parameters, buffers, groups, options and entries of the batch, as `check_alike` takes them."""
    found = dict(fact.split(": ", 1) for fact in step.facts())
    for leaf in describe_batch(step._batch).leaves:
        # Texts and lists, which a step need not read, by their type: a list of rows elsewhere has no other text.
        value = leaf.value if isinstance(leaf, Static) else None
        by_type = isinstance(value, str | bytes | list | tuple | dict)
        found[f"{LEAF}{leaf.key}"] = f"a {type(value).__name__}" if by_type else str(leaf)
    return found


_requires_grad = attrgetter("requires_grad")
_nothing = nullcontext()


@final
class Guards:
    """Values of Python that the trace read, which parameters are trained, and what the optimizers hold.

    Attributes:
        outside: the tensors outside the model that the step reads.
    """

    def __init__(self, captured: Captured, model: nn.Module, optimizers: Optimizers) -> None:
        self._watch = captured.watch
        self.outside = ExternalTensors(captured)
        named = dict(model.named_parameters())
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._trained = list(map(_requires_grad, self._parameters))
        self._several = any(isinstance(each, GlobalTensor) for each in self._parameters)
        self._optimizers = optimizers
        with torch._C.DisableTorchFunction():
            self._hooks = Hooks(model, optimizers)
        members = self._grouped()
        self._members, self._sizes = list(chain.from_iterable(members)), list(map(len, members))

    def changed(self) -> str | None:
        """The first guard that has changed, from what and to what, in words; some microseconds."""
        entry = self._watch.changed()
        if entry is not None:
            return f"{entry.text} was {entry.then} and is {entry.now}"
        found = self.outside.changed()
        if found is None:
            # Otherwise torch asks the class of each global tensor how it gives its flag.
            with torch._C.DisableTorchFunction() if self._several else _nothing:
                now = list(map(_requires_grad, self._parameters))
                if now != self._trained:
                    every = zip(self._names, self._trained, now, strict=True)
                    name, before, flag = next(each for each in every if each[1] != each[2])
                    return f"{name}.requires_grad was {before} and is {flag}"
                found = self._hooks.changed()
        if found is not None:
            return found
        members = self._grouped()
        same = map(is_, chain.from_iterable(members), self._members)
        if list(map(len, members)) != self._sizes or not all(same):
            return "the parameters in the optimizer's groups were others"
        return None

    def numbers_changed(self) -> list[Guard]:
        """The numbers that are other ones now, of the same type."""
        found = [each for each in self._watch.entries if can_follow(each)]
        return [e for e in found if not e.holds() and type(e.value_now) is type(e.value)]

    def _grouped(self) -> list[list[Any]]:
        return [group["params"] for one in self._optimizers.each for group in one.param_groups]


@final
class ExternalTensors:
    """The tensors outside the model that a step reads.

    Ranks share their memory, so that writes in place need nothing. Tensors that get other memory between steps
    (`tensor.data = …`, `set_`, `module.to`) are read there; those that get another shape are a guard.

    Args:
        captured: the step. Tensors that stand for numbers are weft's own.
    """

    def __init__(self, captured: Captured) -> None:
        self._tensors = {
            key: each
            for key, each in captured.constants.items()
            if key not in captured.numbers and not isinstance(each, GlobalTensor)
        }
        self._forms = list(map(_form, self._tensors.values()))
        # As they were compared, followed by the executors, and added up last.
        self._seen = self._followed = list(map(_mark, self._tensors.values()))
        self._added: list[Any] | None = None
        self._on_devices = self._found = 0

    def changed(self) -> str | None:
        """The first one that has another dtype, device, shape or strides, in words; 0.2 microseconds a tensor."""
        seen = list(map(_mark, self._tensors.values()))
        if seen != self._seen:
            forms = list(map(_form, self._tensors.values()))
            for tensor, (place, _) in zip(self._tensors.values(), seen, strict=True):
                if not place and tensor.numel() and tensor.layout == torch.strided:
                    raise UserError(
                        f"a tensor outside the model, {_words(_form(tensor))}, holds no values any more, as torch "
                        "leaves it after tensor.data = … of a live one; use tensor.copy_(weft.whole(…)) instead"
                    )
            for before, now in zip(self._forms, forms, strict=True):
                if before != now:
                    return f"a tensor outside the model was {_words(before)} and is {_words(now)}"
            self._seen = seen
        return None

    def follow(self, executors: Iterable[RankExecutor]) -> None:
        """Let the ranks read them where they are, as `changed` has seen them."""
        if self._seen != self._followed:
            moved = map(ne, self._seen, self._followed)
            found = {
                key: self._tensors[key]
                for key, is_other in zip(self._tensors, moved, strict=True)
                if is_other
            }
            for executor in executors:
                executor.put_constants(found)
            self._followed = self._seen

    def checksum(self, step: int) -> int:
        """Their checksum in a step, which every process must find alike; computed again after a write.

        Writes that torch does not count, such as those through numpy, are seen within some steps. Tensors on devices
        count as they were first, as the host has to wait for them.
        """
        every = self._tensors.values()
        if self._added is None:
            self._on_devices = checksums((x for x in every if not x.is_cpu), 0)
        if self._seen != self._added or is_checked_step(step):
            self._found = checksums((x for x in every if x.is_cpu), 0, self._on_devices)
        self._added = self._seen
        return self._found


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Another one once a tensor is written by torch, or has other memory."""
    place = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return place, 0 if tensor.is_inference() else tensor._version


def _form(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides


def _words(form: tuple[Any, ...]) -> str:
    dtype, device, shape, strides = form
    return f"{dtype} {list(shape)} with strides {list(strides)} on {device}"
