"""Data × tensor × pipeline × ZeRO × recompute × precision: a sample of them, in one process and in four."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from on_ranks import passed
from tools.combinations import (
    LIMITS,
    Combination,
    cells_of,
    combinations,
    difference,
    page,
    train,
)
from tools.scores.stamp import stamp_now

# Each level with each mesh, both models in turn, recompute and precision in every other.
SAMPLE = [
    Combination("gpt", "data 4", 3, True, None),
    Combination("gpt", "tensor 4", 1, False, None),
    Combination("gpt", "data 2 × tensor 2", 2, True, None),
    Combination("gpt", "pipeline 4", 0, True, None),
    Combination("gpt", "pipeline 2 × data 2", 3, False, None),
    Combination("gpt", "pipeline 2 × tensor 2", 0, False, "bf16"),
    Combination("resnet", "data 4", 2, False, "bf16"),
    Combination("resnet", "data 2 × tensor 2", 3, False, None),
    Combination("resnet", "pipeline 4", 1, False, None),
    Combination("resnet", "pipeline 2 × data 2", 1, True, None),
    Combination("resnet", "pipeline 2 × tensor 2", 0, False, None),
]
ON_PROCESSES = [
    Combination("gpt", "pipeline 2 × data 2", 3, True, None),
    Combination("gpt", "pipeline 2 × tensor 2", 0, False, None),
]


@pytest.mark.parametrize("combination", SAMPLE, ids=str)
def test_a_combination_equals_one_device(combination: Combination) -> None:
    assert difference(combination) <= LIMITS[combination.precision]


def test_all_combinations_are_told_apart() -> None:
    every = list(combinations())
    assert len({str(each) for each in every}) == len(every) == 2 * 6 * 4 * 2 * 2
    assert set(SAMPLE + ON_PROCESSES) <= set(every)


@pytest.mark.thorough
@pytest.mark.timeout(320)
def test_four_processes_equal_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("combinations_on_processes.py")
    numbers = [str(list(combinations()).index(each)) for each in ON_PROCESSES]
    passed(script, 4, str(tmp_path), *numbers)
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for number, combination in zip(numbers, ON_PROCESSES, strict=True):
            assert found[number] <= LIMITS[combination.precision]


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(combination: Combination) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses, state = train(combination)
        return losses, {name: tensor + 1e-6 for name, tensor in state.items()}

    monkeypatch.setattr("tools.combinations.train", wrong)
    combination = Combination("gpt", "data 4", 0, False, None)
    assert difference(combination) > LIMITS[None]


def test_the_cells_of_a_page_are_found_again() -> None:
    every = {each: f"{number}" for number, each in enumerate(combinations())}
    assert cells_of(page(every, stamp_now("it", ["tools/combinations.py"]))) == every
