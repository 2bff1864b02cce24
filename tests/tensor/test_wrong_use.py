"""What global tensors refuse, and what the errors say."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pytest
import torch

import weft
from weft.errors import LayoutError, RuleError, UserError

PAIR = weft.placement("cpu", [0, 1])
S, B, P = weft.split, weft.broadcast, weft.partial


pytestmark = pytest.mark.usefixtures("world")


def test_strict_mode_refuses_implicit_boxing_that_moves_bytes():
    x, w = weft.ones(4, 4, placement=PAIR, sbp=S(1)), weft.ones(4, 4, placement=PAIR, sbp=S(0))
    total = x @ w
    with weft.strict_boxing():
        assert (x @ w).sbp == (P(),)
        assert (x + weft.ones(4, 4, placement=PAIR, sbp=B)).sbp == (S(1),)  # slicing is free
        message = (
            r"test_wrong_use.py:\d+: aten.relu.default would move 64 bytes .*operands are laid out as \(P\(sum\)\); "
            r"legal along an axis: B -> B; S\(0\) -> S\(0\).*x.to_global\(sbp=…\)"
        )
        with pytest.raises(LayoutError, match=message):
            torch.relu(total)
        with pytest.raises(LayoutError, match=r"item\(\) would move"):
            total.sum().item()
        assert torch.relu(total.to_global(sbp=B)).full().sum() == 64
    assert torch.relu(total).full().sum() == 64


def test_plain_tensors_are_the_same_on_all_ranks_but_train_nothing_and_are_not_written():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    assert (x * torch.tensor(2.0) + 1).full().tolist() == [3] * 4
    total = weft.ones(4, placement=PAIR, sbp=P())
    assert (total + torch.tensor(2.0)).full().tolist() == [3] * 4
    assert (x + torch.arange(4.0)).full().tolist() == [1, 2, 3, 4]
    assert x.clone().copy_(torch.arange(4.0)).full().tolist() == [0, 1, 2, 3]
    weight = torch.ones(4, requires_grad=True)
    message = r"test_wrong_use.py:\d+: aten.mul.Tensor mixes .*a plain \[4\] that wants a gradient.*weft.distribute"
    with pytest.raises(LayoutError, match=message):
        x * weight
    with torch.no_grad():
        assert (x * weight).full().tolist() == [1] * 4
    with pytest.raises(LayoutError, match="cannot write a global tensor into a plain one"):
        torch.tensor(1.0).add_(x.sum())
    with pytest.raises(LayoutError, match="cannot write a global tensor into a plain one"):
        torch.zeros(4).index_put_((x.long(),), torch.tensor(1.0))


def test_placements_do_not_mix():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    y = weft.ones(4, placement=weft.placement("cpu", [2, 3]), sbp=S(0))
    message = (
        r"aten.add.Tensor has operands on different placements: .*\[0, 1\], .*\[2, 3\].*to_global"
    )
    with pytest.raises(LayoutError, match=message):
        x + y
    assert (x + y.to_global(placement=PAIR)).full().tolist() == [2] * 4


def test_tensors_outlive_their_local_world():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    with weft.local_world(2):
        y = weft.ones(4, placement=PAIR, sbp=P())
    assert (x + y).full().tolist() == [2] * 4


def test_shapes_that_do_not_match():
    x, y = weft.ones(4, 3, placement=PAIR, sbp=S(0)), weft.ones(4, 3, placement=PAIR, sbp=B)
    message = (
        r"test_wrong_use.py:\d+: aten.mm.default of float32\[4, 3\] as \(S\(0\)\).*cannot run: .*"
    )
    with pytest.raises(UserError, match=message):
        x @ y


def test_ranks_outside_of_the_world_and_wrong_layouts():
    with pytest.raises(LayoutError, match=r"names ranks \[7\], but this world has 4"):
        weft.ones(4, placement=weft.placement("cpu", [0, 7]), sbp=S(0))
    with pytest.raises(LayoutError, match="splits dimension 1"):
        weft.ones(4, placement=PAIR, sbp=S(1))
    with pytest.raises(LayoutError, match="weft.ones|weft.full: sbp= must be"):
        weft.ones(4, placement=PAIR, sbp="S(0)")
    with pytest.raises(LayoutError, match="one SBP for each of the 1 axes"):
        weft.ones(4, placement=PAIR, sbp=(S(0), B))


def test_other_devices_are_refused():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    with pytest.raises(LayoutError, match=r"on cpu \[0, 1\] cannot go to meta"):
        x.to("meta")


def test_generators_are_refused():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    with pytest.raises((RuleError, UserError), match=r"test_wrong_use.py:\d+"):
        torch.bernoulli(x, generator=torch.Generator())


def test_writes_that_do_not_fit_are_refused():
    x = weft.ones(4, placement=PAIR, sbp=S(0))
    with pytest.raises(UserError, match=r"test_wrong_use.py:\d+: a result of shape \[4\] cannot"):
        torch.add(x, x, out=weft.ones(3, placement=PAIR, sbp=S(0)))
    with pytest.raises(
        UserError, match="makes torch.float32, which cannot be cast to the torch.int"
    ):
        x.long().add_(x)
    with pytest.raises(UserError, match="reads memory that is not the tensor's"):
        x[1:].as_strided((2,), (1,), 0)
    with pytest.raises(UserError, match="reads memory that is not the tensor's"):
        x.as_strided((4,), (2,))
    with pytest.raises(UserError, match="would reach memory of others"):
        x[1:].resize_(9)
    with pytest.raises(UserError, match="global tensors are strided"):
        x.to_sparse()
