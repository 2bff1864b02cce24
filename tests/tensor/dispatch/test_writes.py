"""Writes of global tensors: in place, through `out=`, through views, and changes of shape."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.ao.quantization as quantization

import weft

S, B, P = weft.split, weft.broadcast, weft.partial
ONE = [(sbp,) for sbp in (S(0), S(1), B, P())]
GRIDS = {
    "2": ([0, 1], ONE),
    "2x2": ([[0, 1], [2, 3]], [a + b for a, b in zip(ONE, ONE[::-1], strict=True)]),
}
LAYOUTS = [(grid, sbp) for grid, every in GRIDS.values() for sbp in every]


def everywhere(whole):
    """The same tensor in all layouts that it may have."""
    for grid, sbp in LAYOUTS:
        if whole.dim() == 2:
            yield weft.tensor(whole, placement=weft.placement("cpu", grid), sbp=sbp)


pytestmark = pytest.mark.usefixtures("world")


IN_PLACE = {
    "square": lambda x, y: x.square_(),
    "pow of a number": lambda x, y: x.pow_(3),
    "pow of a tensor": lambda x, y: x.pow_(y.abs()),
    "power operator": lambda x, y: x.__ipow__(2),
    "float_power": lambda x, y: x.float_power_(2),
    "float_power of a tensor": lambda x, y: x.float_power_(y.abs()),
    "floor division": lambda x, y: x.__ifloordiv__(y.abs() + 1),
    "floor division by a number": lambda x, y: x.__ifloordiv__(0.3),
    "polygamma": lambda x, y: x.polygamma_(1),
    "ldexp": lambda x, y: x.ldexp_(y),
    "ldexp of scalars": lambda x, y: x[0, 0].ldexp_(y[0, 0]),
    "lerp": lambda x, y: x.lerp_(y, 0.3),
    "clamp by a tensor": lambda x, y: x.clamp_(y),
    "fill the diagonal": lambda x, y: x.fill_diagonal_(2.0),
    "and": lambda x, y: (x > 1).__iand__(y > 1),
    "one column": lambda x, y: x.__setitem__((slice(None), 2), 5.0) or x,
    "masked": lambda x, y: x.__setitem__(x > 1.5, 0.0) or x,
    "of other rows": lambda x, y: x.index_put_((torch.tensor([2, 0]),), y[:2]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_equal_plain_torch(name: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.rand(3, 5, dtype=torch.float64) + 1 for _ in range(2))
    expected = IN_PLACE[name](a.clone(), b)
    for x in everywhere(a):
        y = weft.tensor(b, placement=x.placement, sbp=S(0))
        torch.testing.assert_close(IN_PLACE[name](x.clone(), y).full(), expected, msg=str(x.sbp))


def test_out_arguments_are_written() -> None:
    a = torch.arange(15.0).view(3, 5)
    for x in everywhere(a):
        out, empty = torch.zeros_like(x), x.new_empty(0)
        assert torch.maximum(x, 7 - x, out=out) is out
        assert torch.equal(out.full(), torch.maximum(a, 7 - a))
        torch.mul(x, 2, out=empty)
        assert torch.equal(empty.full(), a * 2)
        values, places = x.new_zeros(3), torch.zeros_like(x[:, 0], dtype=torch.int64)
        torch.max(x, 1, out=(values, places))
        assert values.full().tolist() == [4, 9, 14]
        assert places.full().tolist() == [4, 4, 4]


def through_views(x):
    y = x * 2
    y[:, 2] = 5.0
    y[1:].mul_(3)
    y.t()[0].add_(1)
    y.view(-1)[2:5] = y.reshape(-1)[3:6] * 0.5
    return y


def test_writes_to_views_reach_their_base_and_its_gradients() -> None:
    a = torch.arange(15.0).view(3, 5).requires_grad_()
    expected = through_views(a)
    expected.square().sum().backward()
    for x in everywhere(a.detach()):
        x.requires_grad_()
        found = through_views(x)
        found.square().sum().backward()
        torch.testing.assert_close(found.full(), expected, msg=str(x.sbp))
        torch.testing.assert_close(x.grad.full(), a.grad, msg=str(x.sbp))


def test_views_see_writes_to_their_base_and_to_each_other() -> None:
    with torch.no_grad():
        for x in everywhere(torch.zeros(3, 5)):
            flat, rows = x.view(15), x[1:]
            part = flat[3:8]
            x.add_(1)
            part.mul_(5)
            rows.sub_(1)
            assert flat.full().tolist() == [1, 1, 1, 5, 5, 4, 4, 4, *[0] * 7]
            assert part.full().tolist() == [5, 5, 4, 4, 4]
            assert rows.full().flatten().tolist() == [4, 4, 4, *[0] * 7]
            assert x.full().flatten().tolist() == flat.full().tolist()


def test_conjugates_that_had_to_be_computed_see_writes_but_take_none() -> None:
    x = weft.tensor([1 + 2j, 3 - 1j], placement=weft.placement("cpu", [0, 1]), sbp=S(0))
    other = x.conj()
    x.mul_(2)
    assert other.full().tolist() == [2 - 4j, 6 + 2j]
    with pytest.raises(weft.errors.LayoutError, match="had to be copied"):
        other.add_(1)


def test_shapes_change_in_place() -> None:
    a = torch.arange(15.0).view(3, 5)
    for x, change in itertools.product(
        everywhere(a),
        (
            lambda t: t.unsqueeze_(1),
            lambda t: t.t_(),
            lambda t: t.transpose_(0, 1).unsqueeze_(0).squeeze_(),
            lambda t: t.resize_(2, 3),
        ),
    ):
        expected = change(a.clone())
        found = change(x.clone())
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        assert torch.equal((found + 0).full(), expected)


def test_views_by_strides() -> None:
    a = torch.arange(15.0).view(3, 5)

    def windows(t):
        return t.as_strided((4, 3), (2, 1), 1), t.t().as_strided((2, 2), (1, 5), 3)

    for x in everywhere(a):
        for found, expected in zip(windows(x), windows(a), strict=True):
            assert torch.equal(found.full(), expected)


def test_a_backward_through_parts_that_were_written_is_told() -> None:
    x = weft.ones(4, placement=weft.placement("cpu", [0]), sbp=B)
    weight = torch.ones(4, requires_grad=True)
    for part in (x.to_local(), x.shards()[0]):
        product = (part * weight).sum()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.filterwarnings("ignore")
def test_an_op_that_is_only_named_like_a_fused_optimizer() -> None:
    whole = torch.arange(8.0).reshape(2, 4)
    observer = quantization.default_fused_act_fake_quant()
    plain = copy.deepcopy(observer)
    line = weft.placement("cpu", [0, 1])
    ours = weft.distribute(observer, line)
    found = ours(weft.tensor(whole, placement=line, sbp=(B,)))
    torch.testing.assert_close(found.full(), plain(whole))
    torch.testing.assert_close(ours.scale.full(), plain.scale)
