"""Making global tensors, their parts, their text."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import io

import pytest
import torch

import weft
from weft.errors import LayoutError, UserError

PAIR = weft.placement("cpu", [0, 1])
SQUARE = weft.placement("cpu", [[0, 1], [2, 3]])
S, B, P = weft.split, weft.broadcast, weft.partial


@pytest.mark.parametrize("sbp", [S(0), S(-1), B, P()])
def test_constructors_equal_torchs(sbp):
    with weft.local_world(2):
        where = {"placement": PAIR, "sbp": sbp}
        whole = torch.arange(15.0).view(5, 3)
        made = {
            "tensor": (weft.tensor(whole, **where), whole),
            "lists": (weft.tensor([[1, 2], [3, 4]], **where), torch.tensor([[1, 2], [3, 4]])),
            "zeros": (weft.zeros(5, 3, **where), torch.zeros(5, 3)),
            "ones": (weft.ones((5, 3), **where), torch.ones(5, 3)),
            "full": (weft.full((5, 3), 7, **where), torch.full((5, 3), 7)),
            "half": (weft.ones(3, dtype=torch.float64, **where), torch.ones(3).double()),
            "arange": (weft.arange(1, 9, 2, **where), torch.arange(1, 9, 2)),
        }
        for name, (found, expected) in made.items():
            assert found.dtype == expected.dtype, name
            assert torch.equal(found.full(), expected), name
        empty = weft.empty(5, 3, requires_grad=True, **where)
        assert empty.shape == (5, 3)
        assert empty.requires_grad


def test_parts_are_balanced_shards():
    with weft.local_world(4):
        x = weft.tensor(torch.arange(10).view(5, 2), placement=SQUARE, sbp=(S(0), S(0)))
        assert x.shape == (5, 2)
        assert x.placement == SQUARE
        assert x.sbp == (S(0), S(0))
        assert {rank: part[:, 0].tolist() for rank, part in x.shards().items()} == {
            0: [0, 2],
            1: [4],
            2: [6],
            3: [8],
        }
        with pytest.raises(UserError, match=r"got \[0, 1, 2, 3\].*use shards\(\)"):
            x.to_local()


def test_a_world_of_one_has_a_local_tensor():
    one = weft.placement("cpu", [0])
    x = weft.tensor([1.0, 2.0], placement=one, sbp=S(0), requires_grad=True)
    (x.to_local() * 3).sum().backward()
    assert x.to_local().tolist() == [1, 2]
    assert x.grad.full().tolist() == [3, 3]


@pytest.mark.parametrize("source", [S(0), S(1), B, P(), P("max")])
@pytest.mark.parametrize("target", [S(0), S(1), B, P()])
def test_to_global_keeps_the_value(source, target):
    with weft.local_world(4):
        whole = torch.arange(15.0).view(5, 3)
        x = weft.tensor(whole, placement=PAIR, sbp=source)
        y = x.to_global(sbp=target)
        assert y.sbp == (target,)
        assert torch.equal(y.full(), whole)
        there = x.to_global(placement=SQUARE, sbp=(target, S(0)))
        assert there.placement == SQUARE
        assert torch.equal(there.full(), whole)


def test_boxing_never_shares_memory():
    with weft.local_world(2):
        x = weft.ones(4, placement=PAIR, sbp=B)
        for sbp in (S(0), P(), P("max")):
            y = x.to_global(sbp=sbp)
            with torch.no_grad():
                y.mul_(5)
            assert x.full().tolist() == [1] * 4
            assert y.full().tolist() == [5] * 4


def test_gradients_pass_boxing():
    with weft.local_world(4):
        whole = torch.randn(5, 3, dtype=torch.float64)
        weight = torch.randn(5, 3, dtype=torch.float64)
        for sbp in (S(0), S(1), B, P()):
            x = weft.tensor(whole, placement=PAIR, sbp=sbp, requires_grad=True)
            there = x.to_global(placement=SQUARE, sbp=(S(1), B))
            (there.full() * weight).sum().backward()
            assert x.grad.placement == PAIR
            assert torch.equal(x.grad.full(), weight)


def test_from_local_takes_parts():
    with weft.local_world(2):
        parts = {0: torch.ones(3, 2), 1: torch.zeros(2, 2)}
        for part in parts.values():
            part.requires_grad_()
        x = weft.from_local(parts, placement=PAIR, sbp=S(0))
        assert x.shape == (5, 2)
        (x * torch.tensor(2.0)).sum().backward()
        assert parts[1].grad.tolist() == [[2, 2], [2, 2]]
        total = weft.from_local({0: torch.ones(2), 1: torch.ones(2)}, placement=PAIR, sbp=P())
        assert total.full().tolist() == [2, 2]
        with pytest.raises(LayoutError, match=r"rank 0 holds torch.float32 \[2, 2\] of \[4, 2\]"):
            weft.from_local(parts, placement=PAIR, sbp=S(0), shape=(4, 2))
        with pytest.raises(UserError, match=r"no part for ranks \[1\], only for \[0\]"):
            weft.from_local({0: torch.ones(2)}, placement=PAIR, sbp=B)


def test_printed(golden):
    with weft.local_world(4):
        x = weft.arange(6.0, placement=PAIR, sbp=S(0))
        total = weft.from_local({0: torch.ones(2), 1: torch.ones(2)}, placement=PAIR, sbp=P())
        grid = weft.ones(2, 2, placement=SQUARE, sbp=(S(0), B), requires_grad=True)
        golden("\n".join(map(repr, (x, total, grid, grid.sum()))), "printed")


def test_pickling_is_refused_and_copies_are_deep():
    with weft.local_world(2):
        x = weft.ones(4, placement=PAIR, sbp=S(0))
        with pytest.raises(UserError, match=r"pickling of .*x\.full\(\).*full_state_dict"):
            torch.save(x, io.BytesIO())
        module = weft.distribute(torch.nn.Linear(2, 2), PAIR)
        twin = copy.deepcopy(module)
        with torch.no_grad():
            twin.weight.zero_()
        assert isinstance(twin.weight, torch.nn.Parameter)
        assert twin.weight.full().abs().sum() == 0
        twin(weft.ones(4, 2, placement=PAIR, sbp=S(0))).sum().backward()
        assert twin.weight.grad.sbp == (B,)
        assert module.weight.full().abs().sum() > 0


def test_values_come_out():
    with weft.local_world(2):
        x = weft.tensor([1.0, 2.0, 3.0], placement=PAIR, sbp=S(0))
        assert x.tolist() == [1, 2, 3]
        assert float(x.sum()) == 6
        assert bool((x > 0).all())
        assert torch.equal(x, x.to_global(sbp=B))
        with pytest.raises(UserError, match=r"numpy\(\) of .*x\.full\(\)"):
            x.numpy()
