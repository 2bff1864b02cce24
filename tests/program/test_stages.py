"""A model cut into stages trains as on one device: whatever is cut where, on any widths."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import (
    GPT,
    MLP,
    Batch,
    Block,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
    vector_batch,
)
from weft.compiler.loops import loop_values
from weft.errors import StrategyError
from weft.ir import parse_graph
from weft.ir.logical import Box
from weft.layout import Placement

STEPS = 3
S, B = weft.split, weft.broadcast
PAIR, LINE, GRID = [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
GPT_COLUMNS, GPT_ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")
TENSOR = weft.tensor_parallel(GPT_COLUMNS, GPT_ROWS)


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def on(*ranks: Any) -> Placement:
    return weft.placement("cpu", list(ranks))


class UNet(nn.Module):
    """Two levels with skip connections: what the first layers make, and the input, the last ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(8, 12), nn.Linear(12, 6)
        self.middle = nn.Linear(6, 6)
        self.up2, self.up1 = nn.Linear(12, 12), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.down1(x))
        narrow = torch.tanh(self.down2(wide))
        middle = torch.tanh(self.middle(narrow))
        up = torch.tanh(self.up2(torch.cat([narrow, middle], 1)))
        out: torch.Tensor = self.up1(torch.cat([x, wide, up], 1))
        return out


class EncoderDecoder(nn.Module):
    """Every decoder layer reads the encoder's output; a mask and positions are used everywhere."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.encoder = nn.Linear(16, 16)
        self.queries = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.values = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.head = nn.Linear(16, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[1]
        mask = torch.arange(time)[:, None] >= torch.arange(time)[None, :]
        x = self.embed(tokens)
        memory = torch.relu(self.encoder(x))
        for query, value in zip(self.queries, self.values, strict=True):
            scores = query(x) @ memory.transpose(1, 2)
            scores = scores.masked_fill(~mask, float("-inf"))
            x = x + scores.softmax(-1) @ value(memory)
        logits: torch.Tensor = self.head(x)
        return logits


class Noted(nn.Module):
    """Stages as notes in the code, one in the middle of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with weft.stage(0):
            x = torch.tanh(self.first(x))
        with weft.stage(1):
            x = torch.tanh(self.second(x))
        with weft.stage(2):
            out: torch.Tensor = self.head(x + torch.tanh(self.third(x)))
        return out


Job = tuple[Callable[[], nn.Module], Any, Callable[..., Any], int]
JOBS: dict[str, Job] = {
    "mlp": (MLP, classification_loss, vector_batch, 8),
    "gpt": (lambda: GPT(layers=2), token_loss, token_batch, 4),
    "gpt4": (lambda: GPT(layers=4), token_loss, token_batch, 4),
    "tied": (lambda: GPT(layers=2, tied=True), token_loss, token_batch, 4),
    "resnet": (ResNet, classification_loss, image_batch, 4),
    "unet": (UNet, classification_loss, vector_batch, 8),
    "encoder": (EncoderDecoder, token_loss, token_batch, 4),
    "noted": (Noted, classification_loss, vector_batch, 8),
}
DATA: dict[str, Any] = {"batch": {"*": S(0)}, "parameters": {"*": B}}
FRONT, BACK = ["tokens", "positions", "blocks.0"], ["blocks.1.*", "norm", "head"]
DECODER = [["embed.*", "encoder", "*.0"], ["*.1"], ["*.2", "head"]]

CASES: dict[str, tuple[str, Any, weft.Strategy]] = {
    "mlp, by patterns": (
        "mlp",
        PAIR,
        weft.Strategy(
            batch={"*": S(0)}, stages=[weft.Stage(["hidden"], on(0)), weft.Stage(["head"], on(1))]
        ),
    ),
    "mlp, all deduced, the later stage first": (
        "mlp",
        PAIR,
        weft.Strategy(stages=[weft.Stage(["hidden"], on(1)), weft.Stage(["head.weight"], on(0))]),
    ),
    "gpt, four ranks in a row": ("gpt4", LINE, weft.Strategy(batch={"*": S(0)}, stages=4)),
    "gpt, two times data parallel": ("gpt", LINE, weft.Strategy(**DATA, stages=2)),
    "gpt, two times tensor parallel": (
        "gpt",
        GRID,
        weft.Strategy({"*": B}, TENSOR.parameters, stages=2),
    ),
    "gpt, interleaved": ("gpt4", PAIR, weft.Strategy(batch={"*": S(0)}, stages=4)),
    "gpt, 2 ranks then 1": (
        "gpt",
        [0, 1, 2],
        weft.Strategy(**DATA, stages=[weft.Stage(FRONT, on(0, 1)), weft.Stage(BACK, on(2))]),
    ),
    "gpt, 1 rank then 2": (
        "gpt",
        [0, 1, 2],
        weft.Strategy(**DATA, stages=[weft.Stage(FRONT, on(2)), weft.Stage(BACK, on(0, 1))]),
    ),
    "gpt, a grid then a line": (
        "gpt",
        [0, 1, 2, 3, 4, 5],
        weft.Strategy(
            batch={"x": (S(0), B), "y": S(0)},
            parameters=weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS).parameters,
            stages=[weft.Stage(FRONT, on(*GRID)), weft.Stage(BACK, on(4, 5))],
        ),
    ),
    "gpt, the head on all ranks": (
        "gpt",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            parameters={"head.weight": S(0)},
            stages=[
                weft.Stage(FRONT, on(0, 1)),
                weft.Stage(["blocks.*"], on(2, 3)),
                weft.Stage(["norm", "head"], on(*LINE)),
            ],
        ),
    ),
    "tied gpt, two times data parallel": ("tied", LINE, weft.Strategy(**DATA, stages=2)),
    "tied gpt, split vocabulary": (
        "tied",
        LINE,
        weft.Strategy({"*": S(0)}, {"tokens.weight": S(0), "*": B}, stages=2),
    ),
    "resnet, two times data parallel": ("resnet", LINE, weft.Strategy(**DATA, stages=2)),
    "unet, a skip over a stage": (
        "unet",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(["down1"], on(0, 1)),
                weft.Stage(["down2", "middle"], on(2)),
                weft.Stage(["up?"], on(3)),
            ],
        ),
    ),
    "unet, each level a stage": (
        "unet",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(["down1", "up1"], on(0, 1)),
                weft.Stage(["down2", "up2"], on(2)),
                weft.Stage(["middle"], on(3)),
            ],
        ),
    ),
    "encoder and decoder": (
        "encoder",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(patterns, on(*ranks))
                for patterns, ranks in zip(DECODER, ([0, 1], [2], [3]), strict=True)
            ],
        ),
    ),
    "notes in the code": ("noted", [0, 1, 2], weft.Strategy(**DATA, stages=3)),
    "notes, then patterns": (
        "noted",
        [0, 1, 2],
        weft.Strategy(
            **DATA,
            stages=[weft.Stage([], on(0)), weft.Stage(["head"], on(1)), weft.Stage([], on(2))],
        ),
    ),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def plain(job: str, steps: int = STEPS) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """A fresh model, and the losses and the state of its training on one device."""
    make_model, loss_fn, make_batch, size = JOBS[job]
    torch.manual_seed(0)
    model = make_model()
    trained = copy.deepcopy(model)
    optimizer = adamw(trained)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(trained, make_batch(size, seed=seed))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses, trained.state_dict()


def compiled(job: str, model: nn.Module, grid: Any, strategy: weft.Strategy) -> weft.Program:
    _, loss_fn, make_batch, size = JOBS[job]
    return weft.compile(
        model,
        loss_fn,
        adamw(model),
        make_batch(size),
        placement=weft.placement("cpu", grid),
        strategy=strategy,
        seed=5,
    )


def steps(job: str, program: weft.Program, count: int = STEPS) -> list[float]:
    _, _, make_batch, size = JOBS[job]
    return [program.step(make_batch(size, seed=seed)).item() for seed in range(count)]


def assert_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11)


@pytest.mark.timeout(60)
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


@pytest.mark.timeout(60)
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
    loop = loop_values(program.graph)
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


@pytest.mark.timeout(60)
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
        self.blocks = nn.Sequential(Block(16, 2, 0.2), Block(16, 2, 0.2))
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(x)) * self.scale
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
        program = weft.compile(
            model, two_outputs, optimizer, batch, placement=placement, strategy=strategy, seed=3
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
        program = compiled("gpt", model, PAIR, weft.Strategy(stages=2))
        program.step(token_batch())
        again = program.evaluation(lambda m, b: m(b["x"]), token_batch())
        logits = again.step(token_batch())
        model.load_state_dict(program.full_state_dict())
        torch.testing.assert_close(logits, model.eval()(token_batch()["x"]))
        # One activation goes over, and the logits to all.
        assert [shape for _, _, shape in crossings(again)] == [(4, 8, 16), (4, 8, 17)]


def test_a_model_on_the_meta_device_fills_each_stage() -> None:
    with torch.device("meta"):
        model = MLP()
    strategy = CASES["mlp, by patterns"][2]
    with weft.local_world(2):
        program = compiled("mlp", model, PAIR, strategy)
        assert [len(plan.inputs) for plan in program.plan.ranks] == [2 * 4 + 1, 2 * 4 + 1]
        losses = steps("mlp", program)
    assert losses[-1] == pytest.approx(losses[0], rel=1)


def test_explain_and_files_know_stages(tmp_path: Path) -> None:
    strategy = CASES["gpt, 2 ranks then 1"][2]
    strategy.save(tmp_path / "strategy.yaml")
    assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy
    with weft.local_world(3):
        text = compiled("gpt", plain("gpt", 0)[0], [0, 1, 2], strategy).explain()
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
        r"one SBP for each of the 1 axes of cpu \[0, 1\] or 1 axes of cpu \[2\] expected, found 2",
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
