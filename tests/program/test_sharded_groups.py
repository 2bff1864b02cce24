"""ZeRO by patterns of parameters: the steps of plain PyTorch, and memory between that of the levels alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from single_device import adamw, assert_same_training, compiled, plain_training
from weft.errors import StrategyError
from weft.ir.logical import Box, Input
from weft.layout import Split

pytestmark = pytest.mark.usefixtures("double_precision")

Zero = weft.Zero
PAIR, LINE = [0, 1], [0, 1, 2, 3]
DATA = weft.data_parallel()
Zeros = Mapping[str, weft.Zero | None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MIXED: Zeros = {
    "*.bias": None,
    "*norm*": Zero(1),
    "blocks.*.attention.qkv.weight": Zero(2),
    "tokens*": Zero(1),
    "*": Zero(3),
}
CASES: dict[str, tuple[bool, Any, weft.Strategy, Any, Zeros]] = {
    "all levels": (False, LINE, DATA, adamw, MIXED),
    "all levels, SGD, micro-batches": (False, PAIR, replace(DATA, micro_batches=2), sgd, MIXED),
    "all levels, tied, micro-batches": (True, LINE, replace(DATA, micro_batches=2), adamw, MIXED),
    "all levels, two stages": (
        False,
        LINE,
        replace(DATA, stages=2, micro_batches=2),
        adamw,
        MIXED,
    ),
    "the tied table alone": (True, PAIR, DATA, sgd, {"tokens*": Zero(3)}),
    "one block alone": (False, PAIR, DATA, adamw, {"blocks.0.*": Zero(3)}),
    "one block alone, micro-batches": (
        False,
        LINE,
        replace(DATA, micro_batches=2),
        sgd,
        {"blocks.0.*": Zero(3), "blocks.1.*": Zero(2)},
    ),
    "all but a block that runs again": (
        False,
        PAIR,
        replace(DATA, micro_batches=2, recompute=["blocks.*"]),
        adamw,
        {"blocks.1.*": None, "*": Zero(3)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_of_parameters_in_shards(case: str) -> None:
    tied, grid, strategy, make_optimizer, zero = CASES[case]
    torch.manual_seed(0)
    model = GPT(tied=tied)
    batches = [token_batch(8, seed=seed) for seed in range(3)]
    expected = plain_training(model, token_loss, batches, make_optimizer=make_optimizer)
    model = copy.deepcopy(model)
    with weft.local_world(len(grid)):
        program = weft.compile(
            model,
            token_loss,
            make_optimizer(model),
            batches[0],
            placement=weft.placement("cpu", grid),
            strategy=replace(strategy, zero=zero),
        )
        assert_same_training(program, batches, expected)
        program.close()


def sharded(program: weft.Program) -> set[str]:
    """The parameters that lie in shards."""
    inputs = (node for node in program.graph.of_kind(Input) if node.role == "parameter")
    return {node.key for node in inputs if isinstance(node.value.layout.sbp[0], Split)}  # type: ignore[union-attr]


def test_the_first_pattern_of_a_parameter_counts() -> None:
    zero = {"blocks.0.*": None, "blocks.*.weight": Zero(1), "head.*": None, "*": Zero(3)}
    with compiled(GPT(), token_loss, token_batch(4), PAIR, replace(DATA, zero=zero)) as program:
        found = sharded(program)
        assert "blocks.1.attention.qkv.weight" in found
        assert "blocks.1.attention.qkv.bias" in found
        assert not any(name.startswith(("blocks.0.", "head.")) for name in found)
        assert {"tokens.weight", "positions.weight", "norm.bias"} <= found
        text = str(program.explain())
    each = sum(".weight" in name and name.startswith("blocks.") for name in found)
    every = sum(1 for node in program.graph.of_kind(Input) if node.role == "parameter")
    said = f"ZeRO 1 for {each}, 3 for {len(found) - each} of {every} parameters over axis 0"
    assert said in " ".join(text.split())


def test_a_pattern_that_names_no_parameter_is_refused() -> None:
    strategy = replace(DATA, zero={"block.*": None, "*": Zero(3)})
    found = r"zero={'block.\*': …} matches nothing; parameters that exist: "
    with (
        pytest.raises(StrategyError, match=found),
        compiled(GPT(), token_loss, token_batch(4), PAIR, strategy),
    ):
        pass


def gathers(program: weft.Program, shape: tuple[int, ...]) -> int:
    """The number of gathers of parameters of one shape."""
    values = program.graph.values
    boxes = (box for box in program.graph.of_kind(Box) if box.output.shape == shape)
    return sum(str(values[box.input.name].layout.sbp[0])[0] == "S" for box in boxes)  # type: ignore[union-attr]


def test_a_block_between_whole_ones_is_gathered_twice() -> None:
    """Its backward does not follow its forward, so nothing whole of it waits in between."""
    for zero, times in (({"blocks.0.*": Zero(3)}, 2), ({"blocks.*": Zero(3)}, 2 + 2)):
        strategy = replace(DATA, zero=zero)
        with compiled(GPT(), token_loss, token_batch(4), PAIR, strategy) as program:
            assert gathers(program, (48, 16)) == times


@pytest.mark.thorough
def test_memory_of_a_real_size_lies_between_that_of_the_levels() -> None:
    """A decoder of 116 million parameters on 8 H100: the bytes of what lies in shards leave each rank."""
    with torch.device("meta"):
        model = GPT(vocabulary=32_000, width=1024, layers=4, heads=16, context=512)
        batch = token_batch(16, 512, 32_000)
    stored = weft.Job(model, token_loss, adamw(model), batch).stored()
    blocks = sum(p.numel() for name, p in model.named_parameters() if name[:6] == "blocks")

    def planned(zero: weft.Zero | Zeros | None) -> int:
        strategy = replace(DATA, zero=zero, micro_batches=2)
        memory = weft.simulate(stored, strategy, "h100x8").memory
        assert memory is not None
        return int(memory.planned)

    whole, states, every = planned(None), planned(Zero(1)), planned(Zero(3))
    rest = planned({"blocks.*": None, "*": Zero(3)})
    tokens = planned({"tokens*": Zero(1), "*": Zero(3)})
    assert every < tokens < states < whole
    assert every < rest < whole
    # Seven eighths of a parameter, its gradient and two states of float32 (double in this test).
    item = torch.get_default_dtype().itemsize
    assert rest - every == pytest.approx(7 / 8 * 4 * item * blocks, rel=0.2)
    assert planned({"*.bias": None, "*": Zero(3)}) == planned({"*.weight": Zero(3)})
