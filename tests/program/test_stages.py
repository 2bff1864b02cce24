"""A model cut into stages trains as on one device: whatever is cut where, on any widths."""

from __future__ import annotations

import copy
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import GPT, MLP, Batch, token_batch
from program.staged_models import (
    CASES,
    JOBS,
    LINE,
    PAIR,
    B,
    Noted,
    S,
    assert_state,
    compiled,
    on,
    plain,
    steps,
)
from single_device import adamw, plain_training, whole
from weft.errors import StrategyError
from weft.ir import parse_graph
from weft.ir.logical import Box
from weft.layout import Placement

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("case", CASES)
def test_stages_equal_one_device(case: str) -> None:
    job, grid, strategy = CASES[case]
    model, losses, state = plain(job)
    with weft.local_world(torch.tensor(grid).numel()):
        program = compiled(job, model, grid, strategy)
        assert len(program.graph.placements) > 1
        assert parse_graph(str(program.graph)) == program.graph
        assert steps(job, program) == pytest.approx(losses, rel=1e-10)
        assert_state(program.full_state_dict(), state)


@pytest.mark.parametrize("case", ["unet, each level a stage", "encoder and decoder"])
def test_stages_in_micro_batches_equal_one_device(case: str) -> None:
    job, grid, strategy = CASES[case]
    model, losses, state = plain(job)
    with weft.local_world(4):
        program = compiled(job, model, grid, dataclasses.replace(strategy, micro_batches=2))
        assert steps(job, program) == pytest.approx(losses, rel=1e-10)
        assert_state(program.full_state_dict(), state)


def test_tied_weights_cross_once_a_step_also_in_micro_batches() -> None:
    strategy = weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=2)
    with weft.local_world(2):
        program = compiled("tied", plain("tied", 0)[0], PAIR, strategy)
    loop = program.graph.loop
    found = {
        node.output.shape: node.output.name in loop
        for node in program.graph.of_kind(Box)
        if node.output.layout.placement != program.graph.values[node.input.name].layout.placement
    }
    assert found == {(17, 16): False, (2, 8, 16): True, (): False}


LAYERS = ("norm1", "attention.qkv", "attention.proj", "norm2", "up", "down")
MODULES = [
    "tokens",
    "positions",
    *(f"blocks.{block}.{layer}" for block in range(2) for layer in LAYERS),
    "norm",
    "head",
]


@pytest.mark.parametrize(("seed", "micro_batches"), [(4, 1), (1, 2)])
def test_any_cut_works(seed: int, micro_batches: int) -> None:
    """Each layer in any stage, forth and back between ranks; two stages share theirs."""
    draw = random.Random(seed)
    placements = on(0, 1), on(0, 1), on(2, 3)
    where = [*range(3), *(draw.randrange(3) for _ in MODULES[3:])]
    stages = [
        weft.Stage([module for module, stage in zip(MODULES, where, strict=True) if stage == i], at)
        for i, at in enumerate(placements)
    ]
    model, losses, state = plain("gpt")
    with weft.local_world(4):
        strategy = weft.Strategy(stages=stages, micro_batches=micro_batches)
        program = compiled("gpt", model, LINE, strategy)
        assert steps("gpt", program) == pytest.approx(losses, rel=1e-10)
        assert_state(program.full_state_dict(), state)


def crossings(program: weft.Program) -> list[tuple[Placement, Placement, tuple[int, ...]]]:
    """Where from, where to, and the shape of every boxing between placements."""
    values = program.graph.values
    found = []
    for node in program.graph.of_kind(Box):
        source, target = values[node.input.name].layout, node.output.layout
        if source.placement != target.placement:
            found.append((source.placement, target.placement, node.output.shape))
    return found


def test_skips_go_directly_and_each_value_once() -> None:
    job, grid, strategy = CASES["unet, a skip over a stage"]
    with weft.local_world(4):
        found = crossings(compiled(job, plain(job, 0)[0], grid, strategy))
    first, second, third = on(0, 1), on(2), on(3)
    # Each activation to each stage that reads it, and its gradients straight back.
    there = [(first, second, (8, 12)), (first, third, (8, 12)), (second, third, (8, 12))]
    back = [(b, a, shape) for a, b, shape in there]
    assert sorted(map(str, (each for each in found if each[2]))) == sorted(map(str, there + back))


def test_tied_weights_cross_once_a_step() -> None:
    job, grid, strategy = CASES["tied gpt, two times data parallel"]
    with weft.local_world(4):
        program = compiled(job, plain(job, 0)[0], grid, strategy)
        found = [(a, b) for a, b, shape in crossings(program) if shape == (17, 16)]
    # The weight to the head's stage, its gradient back: the update is where the embedding is.
    assert found == [(on(0, 1), on(2, 3)), (on(2, 3), on(0, 1))]


class TwoOutputs(nn.Module):
    """A loss and logits; dropout and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x) * self.scale
        return out


def two_outputs(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    logits = model(batch["x"])
    return {"loss": F.mse_loss(logits, batch["y"]), "logits": logits}


def test_results_masks_states_and_evaluation() -> None:
    """The same program on one rank and in stages: dropout masks, outputs, optimizer states, evaluation."""
    torch.manual_seed(0)
    model = TwoOutputs()
    batch = {"x": torch.randn(4, 3, 16), "y": torch.randn(4, 3, 4)}
    optimizer = adamw(model)
    two_outputs(model, batch)["loss"].backward()
    optimizer.step()  # the program takes its states over

    def run(placement: Placement, strategy: weft.Strategy) -> Any:
        own, states = copy.deepcopy((model, optimizer))
        program = weft.compile(
            own, two_outputs, states, batch, placement=placement, strategy=strategy, seed=3
        )
        results = [program.step(batch) for _ in range(2)]
        evaluated = program.evaluation(two_outputs, batch).step(batch)
        state = program.full_state_dict()
        program.load_full_state_dict({name: value + 1 for name, value in state.items()})
        loaded = program.full_state_dict()
        return results, evaluated, state, {name: loaded[name] - 1 for name in loaded}

    expected = run(on(0), weft.Strategy())
    with weft.local_world(3):
        strategy = weft.Strategy(
            batch={"*": S(0)},
            stages=[weft.Stage(["blocks.0"], on(0, 1)), weft.Stage(["blocks.1", "head"], on(2))],
        )
        found = run(on(0, 1, 2), strategy)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_an_even_split_is_evaluated_where_its_parameters_lie() -> None:
    with weft.local_world(2):
        model, _, _ = plain("gpt", 0)
        twin = copy.deepcopy(model)
        program = compiled("gpt", model, PAIR, weft.Strategy(stages=2))
        program.step(token_batch())
        again = program.evaluation(lambda m, b: m(b["x"]), token_batch())
        logits = again.step(token_batch())
        twin.load_state_dict(program.full_state_dict())
        torch.testing.assert_close(logits, twin.eval()(token_batch()["x"]).detach())
        torch.testing.assert_close(logits, whole(model.eval()(token_batch()["x"])))
        # One activation goes over, and the logits to all.
        assert [shape for _, _, shape in crossings(again)] == [(4, 8, 16), (4, 8, 17)]


def test_a_model_on_the_meta_device_fills_each_stage() -> None:
    with torch.device("meta"):
        model = MLP()
    strategy = CASES["mlp, by patterns"][2]
    with weft.local_world(2) as world:
        program = compiled("mlp", model, PAIR, strategy)
        assert [len(plan.inputs) for plan in program.plan.ranks] == [2 * 4 + 1 for _ in world.ranks]
        values = copy.deepcopy(program.full_state_dict())
        losses = steps("mlp", program)
    alone = MLP()
    alone.load_state_dict(values)
    _, loss_fn, make_batch, size = JOBS["mlp"]
    batches = [make_batch(size, seed=seed) for seed in range(len(losses))]
    expected, _ = plain_training(alone, loss_fn, batches)
    assert losses == pytest.approx(expected, rel=1e-10)


def test_explain_and_files_know_stages(tmp_path: Path) -> None:
    strategy = CASES["gpt, 2 ranks then 1"][2]
    strategy.save(tmp_path / "strategy.yaml")
    assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy
    with weft.local_world(3):
        text = compiled("gpt", plain("gpt", 0)[0], [0, 1, 2], strategy).explain(details=True)
    assert "GPT on cpu [0, 1], cpu [2], cpu [0, 1, 2]" in text
    words = [" ".join(line.split()) for line in text.splitlines()]
    rows = words[words.index("stages") + 2 :][:2]
    assert rows[0].startswith("0 cpu [0, 1] tokens, positions, blocks.0 ")
    assert rows[1].startswith("1 cpu [2] blocks.1, norm, head ")
    # An activation there, its gradient back: 4·8·16 numbers of 8 bytes.
    assert [row.split(" % ")[1] for row in rows] == ["4.0 KiB", "4.0 KiB"]
    assert any("(S(0)) on cpu [0, 1] (B) on cpu [2] transfer 4.0 KiB" in line for line in words)


STAGES = [weft.Stage(["tokens", "positions"], on(0)), weft.Stage(["blocks", "norm"], on(1))]
WRONG: dict[str, tuple[weft.Strategy, str]] = {
    "a pattern": (
        weft.Strategy(stages=[*STAGES, weft.Stage(["haed"], on(2))]),
        r"stages\[2\]: the pattern 'haed' matches nothing; .* head",
    ),
    "a module": (
        weft.Strategy(stages=[*STAGES, weft.Stage(["blocks.1"], on(2))]),
        r"in no stage: head; add a pattern for it to one of the 3 stages",
    ),
    "an empty stage": (
        weft.Strategy(stages=[*STAGES, weft.Stage(["head", "norm"], on(0)), weft.Stage([], on(2))]),
        r"nothing of the model's forward runs in stage 3 of 4",
    ),
    "ranks in two": (
        weft.Strategy(
            stages=[weft.Stage(["tokens"], on(0, 1)), weft.Stage(["head", "*"], on(1, 2))]
        ),
        r"stages 0 and 1 share rank 1 but run on cpu \[0, 1\] and cpu \[1, 2\]",
    ),
    "an idle rank": (weft.Strategy(stages=STAGES), r"rank 2 of the placement .* runs no stage"),
    "an unknown rank": (
        weft.Strategy(stages=[*STAGES, weft.Stage(["head"], on(2, 7))]),
        r"a stage runs on rank 7, the placement is cpu \[0, 1, 2\]",
    ),
    "a tuple for no stage": (
        weft.Strategy(batch={"x": (S(0), B)}, stages=2),
        r"one SBP for each of the 1 axes of cpu \[0, 1\] or 1 axes of cpu \[2\] expected, got 2",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named(wrong: str) -> None:
    strategy, message = WRONG[wrong]
    with weft.local_world(3), pytest.raises(StrategyError, match=message):
        compiled("gpt", GPT(), [0, 1, 2], strategy)


def test_a_note_beyond_the_stages_is_named() -> None:
    with (
        weft.local_world(2),
        pytest.raises(StrategyError, match=r"weft.stage\(2\) at .*: the strategy has 2 stages"),
    ):
        compiled("noted", Noted(), PAIR, weft.Strategy(stages=2))
