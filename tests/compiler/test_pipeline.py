"""The whole pipeline: the text of a graph says all that it goes by, and each pass is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import weft
from compiler import micro_models as micro
from mixtures import Model as Mixtures
from mixtures import word_batch
from models import (
    GPT,
    MLP,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
    vector_batch,
)
from weft.capture import capture
from weft.compiler import pipeline
from weft.compiler.context import options_of
from weft.compiler.passes import Decision
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.schedule import schedule
from weft.compiler.stages import lay_out as stage_layouts
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import strategy_hints
from weft.errors import InternalError
from weft.ir import LocalProgram, LogicalGraph, parse_graph, parse_local
from weft.ir.logical import Call, Input

DATA = weft.Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast})
STAGED = replace(DATA, stages=2, micro_batches=2)
EXPERTS = weft.Strategy(
    batch={"*": weft.split(0)},
    parameters={"layers.*.up": weft.split(0), "layers.*.down": weft.split(0), "*": weft.broadcast},
)


@dataclass(frozen=True)
class Case:
    """A model with its loss and batch, and a strategy for two ranks."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: Callable[[], Mapping[str, Any]]
    strategy: weft.Strategy = STAGED

    def captured(self) -> LogicalGraph:
        torch.manual_seed(0)
        batch = self.batch()
        dtypes = (leaf.dtype for leaf in batch.values() if leaf.is_floating_point())
        model = self.model().to(next(dtypes, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return capture(model, self.loss, optimizer, batch).graph

    def compiled(self, graph: LogicalGraph) -> Compiled:
        where = weft.placement("cpu", [0, 1])
        options = options_of(self.strategy)
        hints = strategy_hints(self.strategy, graph, stage_placements(options.stages, where))
        return compile_graph(graph, hints, where, where.ranks, options)


CASES = {
    "gpt": Case(GPT, token_loss, token_batch),
    "gpt, sharded": Case(
        GPT, token_loss, token_batch, replace(DATA, zero=weft.Zero(3), recompute=("blocks.*",))
    ),
    "convolutions": Case(ResNet, classification_loss, image_batch),
    "mixture": Case(Mixtures, token_loss, word_batch),
    "mixture, split experts": Case(Mixtures, token_loss, word_batch, EXPERTS),
    "recurrent": Case(micro.Recurrent, classification_loss, micro.sequences),
    "contrastive": Case(
        MLP, micro.contrastive, vector_batch, replace(DATA, micro_batches=2, offload=("hidden",))
    ),
}


SMALL = Case(MLP, classification_loss, vector_batch)
# The tables of passes; and functions that drivers call between them, of which a call spoils what follows.
TABLES = ("TRANSFORM", "LAY", "LAID", "ON_RANKS")
CALLED: tuple[tuple[ModuleType, str], ...] = (
    *((pipeline, name) for name in ("lay_out", "localize_all")),
    *((stage_layouts, name) for name in ("copy_sources", "fuse_class_losses", "expand", "box")),
    (schedule, "split_backward"),
)
ROWS = [
    (table, row.__name__)
    for table in TABLES
    for row in getattr(pipeline, table)
    if not isinstance(row, Decision)
]


@pytest.mark.parametrize(("table", "name"), ROWS, ids=[name for _, name in ROWS])
def test_what_a_pass_of_a_table_makes_is_verified_before_the_next(
    table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = getattr(pipeline, table)
    place = [getattr(row, "__name__", "") for row in rows].index(name)
    changed = (*rows[:place], spoiling(rows[place]), *rows[place + 1 :])
    graph = SMALL.captured()
    monkeypatch.setattr(pipeline, table, changed)
    with pytest.raises(InternalError, match="breaks the rule (local_)?values_made_before_use"):
        SMALL.compiled(graph)


@pytest.mark.parametrize(("driver", "name"), CALLED, ids=[name for _, name in CALLED])
def test_what_a_pass_makes_is_verified_before_the_next(
    driver: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = SMALL.captured()
    monkeypatch.setattr(driver, name, spoiling(getattr(driver, name)))
    with pytest.raises(InternalError, match="breaks the rule (local_)?values_made_before_use"):
        SMALL.compiled(graph)


def spoiling(run: Callable[..., Any]) -> Callable[..., Any]:
    """A pass that is called once, and whose result is not legal."""
    seen: list[str] = []

    def spoiled(*args: Any) -> object:
        assert not seen
        seen.append("run")
        return without_first(run(*args))

    return spoiled


def without_first(made: Any) -> Any:
    """Graphs and programs without the first thing that computes."""
    match made:
        case LogicalGraph() | LocalProgram():
            first = next(node for node in made.nodes if not isinstance(node, Input))
            return made.with_nodes(node for node in made.nodes if node is not first)
        case (graph, more):
            return without_first(graph), more
        case dict():
            return {key: without_first(each) for key, each in made.items()}
    raise TypeError(type(made))


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_back_compiles_to_the_same(name: str) -> None:
    case = CASES[name]
    graph = case.captured()
    again = parse_graph(str(graph))
    assert again == graph
    first, second = case.compiled(graph), case.compiled(again)
    assert str(second.graph) == str(first.graph)
    assert second.stages == first.stages
    assert list(map(str, second.programs)) == list(map(str, first.programs))
    assert str(second.plan) == str(first.plan)
    assert second.fingerprint == first.fingerprint
    assert parse_graph(str(first.graph)) == first.graph
    assert tuple(parse_local(str(each)) for each in first.programs) == first.programs


def test_numbers_of_pairs_do_not_tell_what_a_process_did_before() -> None:
    """Ranks compare what they compiled, whatever else they have differentiated."""
    case = CASES["recurrent"]
    first = case.captured()
    torch.ones(3, requires_grad=True).sin().exp().sum().backward()
    assert case.captured() == first
    paired = [call.autograd for call in first.of_kind(Call) if call.autograd is not None]
    assert set(paired) == set(range(max(paired) + 1))
