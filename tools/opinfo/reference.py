"""A sample's values and gradients: one function, run by plain torch and captured by weft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tools.opinfo.samples import Case
from weft.capture import capture
from weft.capture.capture import Captured
from weft.capture.tree import Static


@dataclass(frozen=True, eq=False)
class Expected:
    """What plain torch makes of a sample: tensors by name, and the seeds of its backward."""

    values: dict[str, torch.Tensor]
    seeds: tuple[torch.Tensor, ...]


@dataclass
class Backward:
    """Seeds of the backward: drawn for the results in the first run, given in the later ones."""

    seeds: list[torch.Tensor] = field(default_factory=list)
    given: Sequence[torch.Tensor] | None = None

    def of(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.given is None:
            generator = torch.Generator().manual_seed(1)
            self.seeds = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
            return self.seeds
        return self.given


def values_and_gradients(
    case: Case, tensors: Sequence[torch.Tensor], backward: Backward
) -> dict[str, Any]:
    """The results of a sample, tensors and numbers, and the gradients of its inputs, by name."""
    with torch.enable_grad():
        leaves = [
            x.detach().requires_grad_() if wanted else x
            for x, wanted in zip(tensors, case.wanted, strict=True)
        ]
        # Clones, because some ops write their inputs, which leaves forbid.
        made = case.run([x.clone() if w else x for x, w in zip(leaves, case.wanted, strict=True)])
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        found: dict[str, Any] = {f"result {i}": x for i, x in enumerate(results)}
        numbers = [
            x for x in pytree.tree_leaves(made) if isinstance(x, bool | int | float | complex)
        ]
        found |= {f"number {i}": x for i, x in enumerate(numbers)}
        sources = [x for x in results if x.requires_grad]
        targets = {i: x for i, x in enumerate(leaves) if x.requires_grad}
        if sources and targets:
            grads = torch.autograd.grad(
                sources, list(targets.values()), list(backward.of(sources)), allow_unused=True
            )
            pairs = zip(targets, grads, strict=True)
            found |= {f"gradient {i}": grad for i, grad in pairs if grad is not None}
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def expected(case: Case) -> Expected:
    """Run a sample with plain torch."""
    backward = Backward()
    torch.manual_seed(0)
    found = values_and_gradients(case, [x.clone() for x in case.tensors], backward)
    return Expected({name: torch.as_tensor(x) for name, x in found.items()}, tuple(backward.seeds))


def captured(case: Case, seeds: Sequence[torch.Tensor]) -> tuple[Captured, dict[str, torch.Tensor]]:
    """The graph of values and gradients, and the tensors of its inputs by key."""
    count = len(case.tensors)
    batch = {f"x{i}": x for i, x in enumerate((*case.tensors, *seeds))}

    def step(model: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        tensors = [given[f"x{i}"] for i in range(len(given))]
        return values_and_gradients(case, tensors[:count], Backward(given=tensors[count:]))

    function: Callable[..., Any] = step
    found = capture(torch.nn.Module(), function, None, batch, training=False)
    return found, {**batch, **found.constants}


def constants(found: Captured) -> dict[str, torch.Tensor]:
    """Numbers among the results that were known when the graph was captured."""
    leaves = [leaf for leaf in found.outputs.leaves if isinstance(leaf, Static)]
    return {leaf.key: torch.as_tensor(leaf.value) for leaf in leaves}
