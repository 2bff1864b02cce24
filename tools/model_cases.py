"""Whole models against plain PyTorch: which models, under which strategies, and how they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

import weft
from weft.program.verification import Verified

STEPS, MICRO_BATCHES = 3, 2
RATE, DECAY = 1e-3, 0.1
# In float64 a large eps: some gradients are zero but for rounding, and Adam would divide it by itself.
EPS = {torch.float64: 1e-4, torch.float32: 1e-8}
# The least that a difference is relative to: biases that stay near zero are compared with it.
FLOOR = 1e-4
# The least relative difference of losses that counts as 1 in float32: a net's loss differs by some units of rounding.
LOSS_UNIT = 2**-18
# Plain trainings in float32 from weights that are rounded otherwise.
SHAKEN = 3
LINE, PAIR, GRID = [0, 1, 2, 3], [0, 1], [[0, 1], [2, 3]]
S, B = weft.split, weft.broadcast

Build = Callable[[], nn.Module]
Loss = Callable[[Any, Any], torch.Tensor]
Trained = tuple[list[float], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A model that trains.

    Attributes:
        build: makes the model, in torch's default dtype.
        loss: the loss of the model on a batch.
        batch: makes a batch from its size and a seed.
        layouts: parameters that tensor parallelism splits, by pattern.
        size: of the batch; deep nets with batch norm need more, or they blow rounding up by themselves.
    """

    build: Build
    loss: Loss
    batch: Callable[[int, int], Any]
    layouts: dict[str, Any]
    size: int = 4


@dataclass(frozen=True)
class Difference:
    """The largest differences from plain PyTorch, relative to the largest element.

    Attributes:
        loss: over all steps.
        state: over all parameters and buffers after the last step.
        worst: the name of the one that differs most.
    """

    loss: float
    state: float
    worst: str


def settings(layouts: dict[str, Any]) -> dict[str, tuple[Any, weft.Strategy]]:
    """Every strategy by name: the grid of ranks and what is fixed on it."""
    tensor = weft.Strategy(batch={"*": B}, parameters=layouts)
    both = {pattern: (B, sbp) for pattern, sbp in layouts.items()}
    pipeline = replace(weft.data_parallel(), stages=2, micro_batches=MICRO_BATCHES)
    return {
        "data, 2": (PAIR, weft.data_parallel()),
        "data, 4": (LINE, weft.data_parallel()),
        "tensor, 2": (PAIR, tensor),
        "tensor, 4": (LINE, tensor),
        "hybrid, 2×2": (GRID, weft.Strategy(batch={"*": (S(0), B)}, parameters=both)),
        "automatic, 2": (PAIR, weft.Strategy()),
        "automatic, 4": (LINE, weft.Strategy()),
        "pipeline, 2": (PAIR, pipeline),
        "pipeline × data, 2×2": (GRID, pipeline),
    }


class InDouble(TorchFunctionMode):
    """Casts to float32 in the model's code go to float64: rounding must not hide a wrong layout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        if func is torch._grouped_mm:  # takes no float64; the op of `transformers` does
            kwargs = {"offs": (kwargs or {})["offs"]}
            func = torch.ops.transformers.grouped_mm_fallback
        named = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **named)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def adamw(model: nn.Module, eps: float = EPS[torch.float64]) -> torch.optim.Optimizer:
    """The optimizer of all comparisons."""
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, eps=eps)


class Comparison:
    """Trains a model with plain PyTorch, and under strategies with weft: in float64, and in float32 as users do."""

    def __init__(self, case: Case) -> None:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            self.model = case.build()
            self.batches = [case.batch(case.size, seed) for seed in range(STEPS)]
        finally:
            torch.set_default_dtype(default)
        self._loss = case.loss
        self._plainly = cache(self._trained)
        self._rounding = cache(self._moved_away)
        self._shaken = cache(self._rounded)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The case's loss, all in float64."""
        with InDouble():
            return self._loss(model, batch)

    def rounding(self, strategy: weft.Strategy) -> float:
        """How far plain PyTorch's own result moves when the batches' numbers change by 1e-15."""
        return self._rounding(self._parts(strategy))

    def _moved_away(self, parts: int) -> float:
        moved = [{key: _moved(value) for key, value in batch.items()} for batch in self.batches]
        training = Training(self.model, self.loss, moved)
        state, expected = training.plainly(parts)[1], self._plainly(parts)[1]
        return max(distance(state[name], expected[name]) for name in state)

    def _parts(self, strategy: weft.Strategy) -> int:
        """Into how many batches plain PyTorch has to cut: BatchNorm takes each micro-batch's own statistics."""
        alone = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        return strategy.micro_batches if alone else 1

    def training(
        self, dtype: torch.dtype = torch.float64, eps: float = EPS[torch.float64]
    ) -> Training:
        """What is trained, in a dtype: the same weights and batches, cast."""
        if dtype == torch.float64:
            return Training(self.model, self.loss, self.batches, partial(adamw, eps=eps))
        batches = [cast(batch, dtype) for batch in self.batches]
        model = copy.deepcopy(self.model).to(dtype)
        return Training(model, self._loss, batches, partial(adamw, eps=eps))

    def _rounded(self, parts: int, eps: float) -> list[Trained]:
        """Plain float32 trainings from weights that are rounded otherwise: gradients near zero may change sign."""
        trainings = [self.training(torch.float32, eps) for _ in range(SHAKEN)]
        for seed, training in enumerate(trainings):
            _shake(training.model, seed)
        return [training.plainly(parts) for training in trainings]

    def _trained(
        self, parts: int, dtype: torch.dtype = torch.float64, eps: float = EPS[torch.float64]
    ) -> Trained:
        return self.training(dtype, eps).plainly(parts)

    def compile(self, grid: Any, strategy: weft.Strategy) -> weft.Program:
        """The program of a strategy, for a copy of the model, in a world that is already there."""
        return self.training().compile(grid, strategy)

    def difference(self, grid: Any, strategy: weft.Strategy) -> Difference:
        """Train with weft on as many ranks in this process as the grid has."""
        with weft.local_world(torch.tensor(grid).numel()):
            losses, state = self.training().trained_by(self.compile(grid, strategy))
        expected_losses, expected = self._plainly(self._parts(strategy))
        worst = max(expected, key=lambda name: distance(state[name], expected[name]))
        loss = loss_distance(losses, expected_losses)
        return Difference(loss, distance(state[worst], expected[worst]), worst)

    def single(self, grid: Any, strategy: weft.Strategy) -> float:
        """Train in float32 with torch's default eps.

        Returns:
            the distance of all parameters and buffers from those of plain PyTorch in float32, in units of
            the largest that plain PyTorch has from itself in float64, as it is and from weights that are rounded
            otherwise; or the relative difference of losses in these units, of `LOSS_UNIT` at least, where that is
            larger.
        """
        parts, eps = self._parts(strategy), EPS[torch.float32]
        training = self.training(torch.float32, eps)
        with weft.local_world(torch.tensor(grid).numel()):
            losses, state = training.by_weft(grid, strategy)
        expected_losses, expected = self._plainly(parts, torch.float32, eps)
        exact_losses, exact = self._plainly(parts, torch.float64, eps)
        rounded = [(expected_losses, expected), *self._shaken(parts, eps)]
        found, plain, double = (flat(expected, x) for x in (state, expected, exact))
        far = max(float((flat(expected, x) - double).norm()) for _, x in rounded)
        unit = max(LOSS_UNIT, *(loss_distance(x, exact_losses) for x, _ in rounded))
        moved = float((found - plain).norm()) / far
        return max(moved, loss_distance(losses, expected_losses) / unit)


@dataclass(frozen=True)
class Training:
    """A model that trains a step with each batch: its own copy each time.

    Attributes:
        model, loss, batches: what is trained.
        optimizer: of a model.
        autocast: plain PyTorch computes in bfloat16 as `torch.autocast` says.
    """

    model: nn.Module
    loss: Loss
    batches: Sequence[Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    autocast: bool = False

    def plainly(self, parts: int) -> Trained:
        """Losses and last state with plain PyTorch; gradients accumulate over `parts` equal parts of a batch."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        losses = []
        for batch in self.batches:
            optimizer.zero_grad()
            total = 0.0
            for number in range(parts):
                part = {key: value.chunk(parts)[number] for key, value in batch.items()}
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.loss(model, part) / parts
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
        return losses, model.state_dict()

    def compile(self, grid: Any, strategy: weft.Strategy) -> weft.Program:
        """The program of a strategy, in a world that is already there."""
        model = copy.deepcopy(self.model)
        return weft.compile(
            model,
            self.loss,
            self.optimizer(model),
            self.batches[0],
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )

    def by_weft(self, grid: Any, strategy: weft.Strategy) -> Trained:
        """Losses and last state with weft, in a world that is already there."""
        return self.trained_by(self.compile(grid, strategy))

    def trained_by(self, program: weft.Program) -> Trained:
        """Losses and last state of a program, which is closed."""
        losses = [program.step(batch).item() for batch in self.batches]
        state = program.full_state_dict()
        program.close()
        return losses, state


def cast(batch: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch whose floating-point tensors have a dtype."""
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}


def loss_distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def flat(names: Iterable[str], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All floating-point tensors of a state as one vector of float64, in the order of `names`."""
    tensors = (state[name].detach() for name in names)
    return torch.cat([x.flatten().double() for x in tensors if x.is_floating_point()])


def _moved(value: torch.Tensor) -> torch.Tensor:
    return value * (1 + 1e-15) if value.is_floating_point() else value


def _shake(model: nn.Module, seed: int) -> None:
    """Change each weight by a unit of rounding, up or down."""
    draw = torch.Generator().manual_seed(seed)
    unit = torch.finfo(torch.float32).eps
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + unit * (2 * torch.randint(2, weight.shape, generator=draw) - 1))


def distance(found: torch.Tensor, expected: torch.Tensor, floor: float = FLOOR) -> float:
    """The largest difference, relative to the largest element, or to `floor` where that is more."""
    scale = expected.abs().max().clamp(min=floor).item() if expected.is_floating_point() else 1.0
    return float((found - expected).abs().max()) / scale


def verified(case: Case, grid: Any, strategy: weft.Strategy) -> Verified:
    """What `Program.verify` says of a model in float32, as users train it, after a step.

    Raises:
        VerificationError: when a step gives something else than plain PyTorch.
    """
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(case.size, 0)
    with weft.local_world(torch.tensor(grid).numel()):
        placement = weft.placement("cpu", grid)
        options: Any = {"placement": placement, "strategy": strategy, "verify": True}
        program = weft.compile(model, case.loss, adamw(model), batch, **options)
        program.step(batch)
        found = program.verify(batch)
        program.close()
    return found
