"""Which sorts of rows by experts are taken out, and which must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contexts import NOTHING
from weft.capture import capture
from weft.compiler.experts.remove_sorts import remove_sorts
from weft.ir import verify
from weft.ir.logical import Call

EXPERTS, ROWS, WIDTH = 4, 12, 8
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(x: Tensor, ids: Tensor, w: Tensor, count: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """The products of rows in sorted order, and the order."""
    ids, order = torch.sort(ids)
    offs = torch.histc(ids.float(), count, 0, count - 1).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x[order], w, offs=offs), order


def by_inverse(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return made[back]


def by_argsort(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    return made[order.argsort()]


def by_two_argsorts(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The experts are put in order by the order of their rows."""
    order = torch.argsort(ids)
    ids = ids[order]
    offs = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x[order], w, offs=offs)[order.argsort()]


def by_writing(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    out = torch.zeros_like(made)
    out[order] = made
    return out


def by_adding(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    return torch.zeros_like(made).index_add(0, order, made)


def by_adding_tokens(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    return torch.ones(ROWS // 2, WIDTH).index_add(0, order // 2, made)


def summed(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return rows(x, ids, w)[0].sin().sum(0)


def with_numbers(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Looks at where rows stand."""
    made, order = rows(x, ids, w)
    return (made + torch.arange(ROWS).unsqueeze(1))[order.argsort()]


def shifted(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each row meets the next."""
    made, order = rows(x, ids, w)
    return (made + made.roll(1, 0))[order.argsort()]


def summed_up_to(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    made, order = rows(x, ids, w)
    return made.cumsum(0)[order.argsort()]


def dropped(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Draws numbers by position."""
    made, order = rows(x, ids, w)
    return F.dropout(made, 0.5)[order.argsort()]


def first_ones(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return rows(x, ids, w)[0][:3]


def in_order(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Never put back, but what is made of them is a sum."""
    return rows(x, ids, w)[0]


def too_few(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The last expert is not among those that are counted."""
    made, order = rows(x, ids, w[:-1], EXPERTS - 1)
    return made[order.argsort()]


def moved_on(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Numbers that may lie beyond the experts."""
    return by_inverse(x, ids + 1, w)


def sorts(way: Way) -> int:
    """How many are left of the sort by experts, in a step with its backward."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
            self.gate = nn.Linear(WIDTH, EXPERTS)

        def forward(self, x: Tensor) -> Tensor:
            scores, ids = self.gate(x).max(-1)
            return (way(x * scores.unsqueeze(1), ids, self.w) ** 2).sum()

    return sum(
        node.op.startswith("aten.sort") for node in calls_of(Step(), torch.randn(ROWS, WIDTH))
    )


def calls_of(model: nn.Module, batch: Any) -> list[Call]:
    """Those of a step with its backward, after the pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = capture(model, lambda model, batch: model(batch), optimizer, batch)
    return list(verify(remove_sorts(captured.graph, NOTHING)).of_kind(Call))


@pytest.mark.parametrize(
    "way",
    [
        by_inverse,
        by_argsort,
        by_two_argsorts,
        by_writing,
        by_adding,
        by_adding_tokens,
        summed,
        in_order,
    ],
)
def test_sorts_that_nothing_depends_on_go(way: Way) -> None:
    assert sorts(way) == 0


@pytest.mark.parametrize(
    "way",
    [with_numbers, shifted, summed_up_to, dropped, first_ones, too_few, moved_on],
)
def test_sorts_that_something_depends_on_stay(way: Way) -> None:
    assert sorts(way) >= 1


class Given(nn.Module):
    """Two products on rows whose experts come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        made = F.grouped_mm(batch["x"], self.w, offs=batch["offs"]).sin()
        return F.grouped_mm(made, self.w, offs=batch["offs"]).square().sum()


def test_products_of_the_same_rows_are_of_one_mixture() -> None:
    offs = torch.full((EXPERTS,), ROWS, dtype=torch.int32)
    calls = calls_of(Given(), {"x": torch.randn(ROWS, WIDTH), "offs": offs})
    assert sum(node.op == "weft.segments" for node in calls) == 1
    products = [node for node in calls if node.op.startswith("weft.expert")]
    assert len(products) > 3
    assert len({node.args[2] for node in products}) == 1
