"""The matrix of bytes: its sums are what the plan sends, and its cells say who sends to whom."""

from __future__ import annotations

from typing import Any

import pytest

import weft
from report.reported import planned
from weft.planning.exchanges import exchanges
from weft.report import sent_matrix
from weft.report.sent_matrix import sent_bytes
from weft.strategy.strategy import Strategy

DATA = {"*": weft.split(0)}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "data": ({"batch": DATA}, (4,)),
    "zero": ({"batch": DATA, "zero": weft.Zero(3)}, (4,)),
    "stages": ({"batch": DATA, "stages": 2, "micro_batches": 4}, (2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_sums_to_what_the_plan_sends(case: str) -> None:
    entries, grid = CASES[case]
    compiled, simulation = planned(Strategy(**entries), grid)
    found = sent_bytes(compiled)
    assert found["ranks"] == [0, 1, 2, 3]
    total = sum(size for *_, size in found["cells"])
    assert total == pytest.approx(sum(each.bytes for each in exchanges(compiled)), abs=64)
    assert total == pytest.approx(simulation.sent_bytes, rel=0.01)
    assert all(row != column and size > 0 for row, column, _, size in found["cells"])
    assert sum(size for *_, size, _ in found["largest"]) <= total + 64


def test_gradients_go_all_ways_and_activations_from_stage_to_stage() -> None:
    compiled, _ = planned(Strategy(batch=DATA, stages=2, micro_batches=4), (2, 2))
    found = sent_bytes(compiled)
    pairs: dict[str, set[tuple[int, int]]] = {}
    for row, column, group, _ in found["cells"]:
        pairs.setdefault(found["groups"][group], set()).add((row, column))
    # Stage 0 is on ranks 0 and 1, stage 1 on 2 and 3.
    assert pairs["gradients of parameters"] == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert pairs["between stages"] <= {
        (0, 2),
        (1, 3),
        (2, 0),
        (3, 1),
        (0, 3),
        (1, 2),
        (2, 1),
        (3, 0),
    }
    assert {(0, 2), (1, 3)} <= pairs["between stages"]


def test_even_shares_of_a_collective() -> None:
    compiled, _ = planned(Strategy(batch=DATA), (4,))
    found = sent_bytes(compiled)
    own = found["groups"].index("gradients of parameters")
    sizes = {size for *_, group, size in found["cells"] if group == own}
    assert len(sizes) == 1
    assert found["kinds"][own]


def test_many_ranks_share_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, _ = planned(Strategy(batch=DATA), (4,))
    whole = sum(size for *_, size in sent_bytes(compiled)["cells"])
    monkeypatch.setattr(sent_matrix, "MOST_CELLS", 2)
    found = sent_bytes(compiled)
    assert found["apart"] == 2
    assert {(row, column) for row, column, *_ in found["cells"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert sum(size for *_, size in found["cells"]) == pytest.approx(whole, abs=64)


def test_one_rank_sends_nothing() -> None:
    compiled, _ = planned(Strategy(), (1,))
    assert sent_bytes(compiled) == {}
