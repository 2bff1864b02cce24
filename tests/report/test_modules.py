"""Signatures of calls beside the others of their rules: the chosen one is among them, with costs as deduction has."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from report.reported import planned
from weft.hardware import CostModel
from weft.ir.logical import Call
from weft.report.modules import Choices, model_rows
from weft.strategy.strategy import Strategy

DATA = {"*": weft.split(0)}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "data": ({"batch": DATA}, (4,)),
    "stages": ({"batch": DATA, "stages": 2, "micro_batches": 4}, (2, 2)),
}


@pytest.mark.parametrize("case", ["data", "stages"])
def test_the_chosen_is_among_them(case: str) -> None:
    entries, grid = CASES[case]
    compiled, _ = planned(Strategy(**entries), grid)
    choices = Choices(compiled.graph)
    numbers = [choices.of(call) for call in compiled.graph.of_kind(Call)]
    assert max(numbers) == len(choices.found) - 1
    assert len(set(numbers)) < len(numbers)  # equal calls share one
    axes = [each for choice in choices.found for each in choice["axes"]]
    assert axes
    for each in axes:
        signatures = [row[0] for row in each["rows"]]
        assert len(set(signatures)) == len(signatures) > 1
        assert [row[-1] for row in each["rows"][:8]] == sorted(row[-1] for row in each["rows"][:8])
        assert each["ranks"] == grid[each["axis"]]
    chosen = [each for each in axes if each["chosen"] in {row[0] for row in each["rows"]}]
    assert len(chosen) > 0.9 * len(axes)
    # Of most calls, the chosen one is the cheapest by itself, too.
    cheapest = [each for each in chosen if each["rows"][0][0] == each["chosen"]]
    assert len(cheapest) > 0.6 * len(chosen)


def test_what_a_product_would_have_cost() -> None:
    """A product whose rows are split moves nothing; with its other operand split, its result would be gathered."""
    compiled, _ = planned(Strategy(batch=DATA), (4,))
    choices = Choices(compiled.graph)
    product = next(
        call
        for call in compiled.graph.of_kind(Call)
        if call.op.startswith("aten.mm") and call.phase.kind == "forward"
    )
    assert choices.of(product) >= 0
    (axis,) = choices.found[choices.of(product)]["axes"]
    rows = {row[0]: row[1:] for row in axis["rows"]}
    assert axis["chosen"] == "S(0), B -> S(0)"
    work, moved, exchanges, total = rows["S(0), B -> S(0)"]
    assert (moved, exchanges) == (0, 0)
    assert total == work
    other_work, moved, exchanges, total = rows["B, B -> B"]
    assert other_work > work  # each rank makes it all
    assert moved > 0 < exchanges
    assert total == pytest.approx(other_work + CostModel().boxing(moved, exchanges), abs=1)


def test_rows_of_a_model() -> None:
    strategy = Strategy(batch=DATA, zero=weft.Zero(3), recompute=["blocks.0"])
    compiled, _ = planned(strategy, (4,))
    found = model_rows(compiled, strategy)
    rows = {row["path"]: row for row in found["rows"]}
    head = rows["head.weight"]
    assert (head["role"], head["stage"], head["grid"], head["ranks"]) == (
        *("parameter", 0, [4]),
        [[0, 3]],
    )
    assert head["layout"][0].startswith("S(")
    assert head["stored"] == 0
    assert any(each.startswith("ZeRO 3") for each in head["why"])
    assert set(head["states"]) == {"exp_avg", "exp_avg_sq", "step"}
    assert head["states"]["exp_avg"]["layout"] == head["layout"]
    modules = [row for row in found["rows"] if row["role"] == "module"]
    again = {row["path"]: row["again"] for row in modules}
    assert sum(n for path, n in again.items() if path.startswith("blocks.0")) > 0
    assert not any(n for path, n in again.items() if path.startswith("blocks.1"))
    for row in modules:
        assert row["lines"]
        for *_, number, times in row["calls"]:
            assert -1 <= number < len(found["choices"])
            assert times > 0


def test_a_pattern_is_the_reason() -> None:
    strategy = Strategy(batch=DATA, parameters={"head.*": weft.split(0)})
    compiled, _ = planned(strategy, (4,))
    rows = {row["path"]: row for row in model_rows(compiled, strategy)["rows"]}
    assert rows["head.weight"]["why"] == ['parameters["head.*"] of the strategy fixes its layout']
    assert rows["norm.weight"]["why"] == [
        "its layout is deduced: the cheapest for all calls together"
    ]
    assert model_rows(compiled, None)["rows"][0]["why"] == []


def test_stages_are_told() -> None:
    entries, grid = CASES["stages"]
    compiled, _ = planned(Strategy(**entries), grid)
    rows = {row["path"]: row for row in model_rows(compiled, None)["rows"]}
    assert (rows["tokens.weight"]["stage"], rows["head.weight"]["stage"]) == (0, 1)
    assert rows["tokens.weight"]["ranks"] == [[0, 1]]
    assert rows["head"]["stages"] == [1]
