"""Steps that are searched."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import weft
from models import GPT, token_batch, token_loss
from weft.hardware.topology import Topology
from weft.planning.machine import machine_of
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.evaluator import Evaluator
from weft.search.lower_bounds import LowerBounds
from weft.search.measures import Measures
from weft.search.space import space_of
from weft.search.state import SearchState
from weft.search.steps.facts import StepFacts
from weft.strategy.strategy import Strategy


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def job(width: int = 256, samples: int = 8) -> weft.Job:
    """Two layers whose gradients are worth a look on slow links."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    batch = {"x": torch.zeros(samples, width), "y": torch.zeros(samples, dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch)


@cache
def layers() -> StoredStep:
    """The step of two layers."""
    return job().stored()


@cache
def decoder(blocks: int = 3, precision: Literal["bf16"] | None = None) -> StoredStep:
    """A decoder of so many blocks."""
    torch.manual_seed(0)
    model = GPT(layers=blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    made = weft.Job(model, token_loss, optimizer, token_batch(n=4))
    return made.stored(strategy=weft.Strategy(precision=precision))


def step_of(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> StoredStep:
    """The step of a model that tells classes, on inputs of a shape."""
    batch = {"x": torch.zeros(shape, dtype=dtype), "y": torch.zeros(shape[0], dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch).stored()


def dense(*widths: int) -> nn.Sequential:
    """Layers of these widths."""
    found: list[nn.Module] = []
    for one, other in pairwise(widths):
        found += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*found[:-1])


def few_samples() -> StoredStep:
    """Gradients larger than what is around them."""
    return step_of(dense(512, 512, 512, 512, 10), 4, 512)


def many_samples() -> StoredStep:
    """Weights smaller than what they make."""
    return step_of(dense(32, 32, 32, 32, 10), 2048, 32)


@cache
def many_classes() -> StoredStep:
    """Few samples of many classes: the classes are split where layouts are free, which no strategy by hand says."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 100_000))
        batch = {"x": torch.empty(64, 1024), "y": torch.empty(64, dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.AdamW(model.parameters()), batch).stored()


def begun(
    step: StoredStep,
    topology: str | Topology,
    limit: int | None = None,
    base: Strategy = Strategy(),  # noqa: B008 (frozen)
) -> SearchState:
    """The beginning of a search of any length, where `base` is fixed."""
    machine = machine_of(topology)
    facts = StepFacts(step, machine, base)
    evaluator = Evaluator(step, machine, facts.ranks)
    return SearchState(evaluator, LowerBounds(facts, limit), Budget.of(1.0, 10**6))


def arranged(
    step: StoredStep,
    topology: str | Topology,
    limit: int | None = None,
    base: Strategy = Strategy(),  # noqa: B008 (frozen)
    every_rank: bool = False,
) -> SearchState:
    """The beginning of a search whose candidates are in its queue."""
    found = begun(step, topology, limit, base)
    found.arrange(space_of(found.facts, every_rank))
    return found


@cache
def reserve() -> int:
    """Bytes that each device of "h100x2" reserves."""
    return begun(layers(), "h100x2").lower_bounds.reserve


def planned(found: SearchState, candidate: Candidate) -> Measures:
    """The measures of a candidate, planned whole."""
    answer = found.evaluator.of(found.strategy(candidate))
    assert isinstance(answer, Measures), f"{candidate}: {answer}"
    return answer


def least_of(lower_bounds: LowerBounds, candidate: Candidate) -> float:
    """Seconds that a step of a candidate takes at least."""
    return float(lower_bounds.least(CandidateTable.of([candidate]))[0])


def least_memory_of(lower_bounds: LowerBounds, candidate: Candidate) -> float:
    """Bytes that a rank of a candidate takes at least."""
    return float(lower_bounds.memory(CandidateTable.of([candidate]))[0])
