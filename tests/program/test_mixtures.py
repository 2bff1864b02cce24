"""Mixtures of experts with torch's grouped products: equality, what travels, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from mixtures import WORDS, pair, plain_product
from models import token_batch, token_loss
from single_device import assert_same_training, compiled, plain_training
from weft.errors import RankFailure
from weft.ir.logical import Call

pytestmark = pytest.mark.usefixtures("double_precision")

S, B = weft.split, weft.broadcast
UP, DOWN = "*.up", "*.down"


def batches(rows: int = 8) -> list[Any]:
    return [token_batch(rows, vocabulary=WORDS, seed=seed) for seed in range(3)]


def calls(program: weft.Program) -> list[str]:
    return [node.op for node in program.graph.of_kind(Call)]


DATA = weft.data_parallel()
EXPERT = weft.expert_parallel([UP, DOWN])
WHOLE = weft.Strategy({"*": B}, {f"{UP}*": S(0), f"{DOWN}*": S(0), "*": B})
GRID = [[0, 1], [2, 3]]
STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": ([0, 1], DATA),
    "zero 3": ([0, 1, 2], replace(DATA, zero=weft.Zero(3))),
    "tensor": ([0, 1], weft.Strategy({"*": B}, {UP: S(1), DOWN: S(2), "*": B})),
    "expert, 4": ([0, 1, 2, 3], EXPERT),
    "expert, tokens whole": ([0, 1], WHOLE),
    "expert, uneven": ([0, 1, 2], EXPERT),
    "expert x data": (GRID, weft.Strategy({"*": S(0)}, {UP: (B, S(0)), DOWN: (B, S(0)), "*": B})),
    "expert x tensor": (
        GRID,
        weft.Strategy({"*": (S(0), B)}, {UP: (S(0), S(1)), DOWN: (S(0), S(2)), "*": B}),
    ),
    "expert, zero 2": ([0, 1], replace(EXPERT, zero=weft.Zero(2))),
    "expert, micro-batches": ([0, 1], replace(EXPERT, micro_batches=2)),
    "expert, recompute": ([0, 1], replace(EXPERT, recompute=["layers.*"])),
    "expert, stages": (GRID, replace(EXPERT, stages=2, micro_batches=2)),
    "automatic": ([0, 1], weft.Strategy()),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_three_steps(name: str) -> None:
    model, plain = pair(layers=2 if "stages" in name else 1)
    expected = plain_training(plain, token_loss, batches())
    with compiled(model, token_loss, batches()[0], *STRATEGIES[name]) as program:
        assert "aten.sort.default" not in calls(program)
        assert_same_training(program, batches(), expected)


@pytest.mark.parametrize("strategy", [WHOLE, replace(EXPERT, parameters=WHOLE.parameters)])
def test_biases_of_three_experts_for_a_token(strategy: weft.Strategy) -> None:
    """They are added where their rows are, and only sums of a token's rows come back."""
    model, plain = pair(each=3, biased=True)
    expected = plain_training(plain, token_loss, batches())
    with compiled(model, token_loss, batches()[0], [0, 1], strategy) as program:
        assert "aten.index.Tensor" not in calls(program)
        assert_same_training(program, batches(), expected)


@pytest.mark.parametrize(("rows", "strategy"), [(6, DATA), (5, EXPERT)], ids=["data", "expert"])
def test_uneven_tokens(rows: int, strategy: weft.Strategy) -> None:
    model, plain = pair()
    expected = plain_training(plain, token_loss, batches(rows))
    with compiled(model, token_loss, batches(rows)[0], [0, 1, 2, 3], strategy) as program:
        assert_same_training(program, batches(rows), expected)


@pytest.mark.parametrize(
    ("strategy", "bias"),
    [(DATA, [9.0, 0.0, 0.0, 9.0]), (EXPERT, [9.0, 9.0, 0.0, 0.0])],
    ids=["data", "expert"],
)
def test_experts_without_tokens(strategy: weft.Strategy, bias: list[float]) -> None:
    model, plain = pair()
    for one in (model, plain):
        for layer in one.layers:
            layer.gate.bias.data = torch.tensor(bias)
    expected = plain_training(plain, token_loss, batches())
    with compiled(model, token_loss, batches()[0], [0, 1, 2, 3], strategy) as program:
        assert_same_training(program, batches(), expected)


def test_more_rows_than_the_buffers_hold() -> None:
    """No row is dropped: the step raises, and says which capacity would do."""
    model, _ = pair()
    for layer in model.layers:
        layer.gate.bias.data = torch.tensor([9.0, 9.0, 0.0, 0.0])
    strategy = weft.expert_parallel([UP, DOWN], capacity=1.25)
    message = r"64 rows for the experts .*, of its 64; the buffers hold 40: .*\(capacity=2\) or"
    with (
        compiled(model, token_loss, batches()[0], [0, 1], strategy) as program,
        pytest.raises(RankFailure, match=message),
    ):
        program.step(batches()[0])


def test_capacity_that_is_enough() -> None:
    model, plain = pair()
    expected = plain_training(plain, token_loss, batches())
    strategy = weft.expert_parallel([UP, DOWN], capacity=1.9)
    with compiled(model, token_loss, batches()[0], [0, 1], strategy) as program:
        assert_same_training(program, batches(), expected)


class Given(nn.Module):
    """Experts that come with the batch: nobody knows that they are not negative."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, batch: Any) -> torch.Tensor:
        ids, order = torch.sort(batch["ids"])
        offs = torch.histc(ids.float(), 3, 0, 2).cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(batch["x"][order], self.w, offs=offs)
        return (rows**2).sum()


def test_experts_that_may_be_negative_keep_the_sort() -> None:
    """Torch's product means positions then: the first rows are those of the first expert."""
    torch.manual_seed(0)
    ids = torch.tensor([2, -1, 0, 2, 1, -1, 2, 2])
    model, x = Given(), torch.randn(8, 4)
    rows = x[ids.sort(stable=True)[1]]
    expected = sum(
        ((r @ w) ** 2).sum() for r, w in zip(rows.split([1, 1, 4, 2]), model.w, strict=False)
    )
    batch = {"x": x, "ids": ids}
    with compiled(model, own_loss, batch, [0, 1], DATA) as program:
        assert program.step(batch).item() == pytest.approx(expected.item(), rel=1e-10)


def by_position(x: Tensor) -> Tensor:
    """Looks at where a row stands among the sorted ones."""
    return F.silu(x) + torch.arange(x.shape[0]).unsqueeze(-1) / 64


def test_what_depends_on_the_order_keeps_the_sort() -> None:
    model, plain = pair(middle=by_position)
    expected = plain_training(plain, token_loss, batches())
    with compiled(model, token_loss, batches()[0], [0, 1], EXPERT) as program:
        assert calls(program).count("aten.sort.default") == 1
        assert_same_training(program, batches(), expected)


class Late(nn.Module):
    """Experts that are known only after the rows have been worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.up, self.down = (nn.Parameter(torch.randn(2, 4, 4)) for _ in range(2))

    def forward(self, batch: Any, product: Any = F.grouped_mm) -> Tensor:
        rows = F.silu(batch["x"] * self.scale)
        offs = batch["offs"] + 0
        made: Tensor = product(F.silu(product(rows, self.up, offs=offs)), self.down, offs=offs)
        return made.square().sum()


class Again(Late):
    """Rows of the batch, sent as they are."""

    def forward(self, batch: Any, product: Any = F.grouped_mm) -> Tensor:
        offs = batch["offs"] + 0
        made = F.silu(product(batch["x"], self.up, offs=offs)) * self.scale
        return torch.as_tensor(product(made, self.down, offs=offs)).square().sum()


@pytest.mark.parametrize(("kind", "again"), [(Late, []), (Again, ["0"])])
def test_rows_are_sent_when_their_experts_are_known(kind: Any, again: list[str]) -> None:
    """Those of the forward and, where it runs again, of the backward: the same rows two ways."""
    torch.manual_seed(0)
    layer, offs = kind(), torch.tensor([3, 8], dtype=torch.int32)
    given = [{"x": torch.randn(8, 4), "offs": offs} for _ in range(3)]
    model = nn.Sequential(layer)
    expected = plain_training(model, lambda model, batch: model[0](batch, plain_product), given)
    experts = {UP: S(0), DOWN: S(0)}
    strategy = weft.Strategy(batch={"*": B}, parameters=experts, recompute=again)
    with compiled(model, own_loss, given[0], [0, 1], strategy) as program:
        assert_same_training(program, given, expected)


class Grouped(nn.Module):
    """Every form of torch's grouped product, on rows that come sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, batch: Any) -> Tensor:
        x, offs = batch["x"], batch["offs"]
        rows = F.grouped_mm(x, self.w, offs=offs)
        columns = torch._grouped_mm(self.w, x.t(), offs=offs)
        inner = F.grouped_mm(x.t(), rows, offs=offs)
        every = F.grouped_mm(self.w, self.w)
        return (rows**2).sum() + (columns**3).sum() + (inner**2).sum() + every.sum()


class Apart(Grouped):
    """The same by plain products."""

    def forward(self, batch: Any) -> Tensor:
        x, w = batch["x"], self.w
        parts = list(zip(x.split([2, 0, 5]), w, strict=True))
        rows = torch.cat([part @ one for part, one in parts])
        columns = torch.cat([one @ part.t() for part, one in parts], 1)
        inner = torch.stack(
            [p.t() @ r for p, r in zip(x.split([2, 0, 5]), rows.split([2, 0, 5]), strict=True)]
        )
        return (rows**2).sum() + (columns**3).sum() + (inner**2).sum() + (w @ w).sum()


@pytest.mark.parametrize("sbp", [S(0), S(1)])
def test_forms_of_grouped_products(sbp: Any) -> None:
    torch.manual_seed(0)
    plain, offs = Apart(), torch.tensor([2, 2, 7], dtype=torch.int32)
    model = Grouped()
    model.load_state_dict(plain.state_dict())
    given = [{"x": torch.randn(7, 4), "offs": offs} for _ in range(3)]
    expected = plain_training(plain, own_loss, given)
    strategy = weft.Strategy(batch={"x": S(0)}, parameters={"w": sbp})
    with compiled(model, own_loss, given[0], [0, 1], strategy) as program:
        assert_same_training(program, given, expected)


def own_loss(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def test_half_precision() -> None:
    """Within the precision of bfloat16 of the same model on one device."""
    torch.set_default_dtype(torch.float32)
    model, plain = pair()
    model, plain = model.bfloat16(), plain.bfloat16()
    losses, _ = plain_training(plain, token_loss, batches())
    with compiled(model, token_loss, batches()[0], [0, 1], EXPERT) as program:
        found = [program.step(batch).item() for batch in batches()]
    assert found == pytest.approx(losses, rel=2e-2)
