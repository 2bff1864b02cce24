"""Families of ops that run otherwise on global tensors than by one rule: lazy bits, casts, values, whole matrices."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined, call-overload"

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft

S, B, P = weft.split, weft.broadcast, weft.partial
PAIR, GRID = [0, 1], [[0, 1], [2, 3]]


pytestmark = pytest.mark.usefixtures("world")


LAYOUTS = ((S(0),), (B,), (P(),))


def same(op, *given, layouts=LAYOUTS, grid=PAIR, gradients=True):
    """Results, and gradients of the first tensor, equal those of plain torch in each layout."""
    wanted = gradients and (given[0].is_floating_point() or given[0].is_complex())
    first = given[0].clone().requires_grad_(wanted)
    expected = op(first, *given[1:])
    if wanted:
        expected.abs().sum().backward()
    placement = weft.placement("cpu", grid)
    for sbp in layouts:
        x = weft.tensor(given[0], placement=placement, sbp=sbp).requires_grad_(wanted)
        found = op(x, *(weft.tensor(y, placement=placement, sbp=B) for y in given[1:]))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.full(), expected, msg=lambda m, s=sbp: f"{s}: {m}")
        if wanted:
            found.abs().sum().backward()
            torch.testing.assert_close(x.grad.full(), first.grad, msg=lambda m, s=sbp: f"{s}: {m}")


COMPLEX = {
    "product": lambda z: z.conj() * z,
    "sum": lambda z: z.conj().sum(),
    "cat": lambda z: torch.cat([z.conj(), z]),
    "angle": lambda z: z.conj().angle(),
    "imaginary part": lambda z: z.conj().imag * 2,
    "adjoint": lambda z: z.mH @ z,
    "fft": lambda z: torch.fft.fft(z.conj()),
    "irfft": lambda z: torch.fft.irfft(z.conj()),
    "covariance": lambda z: torch.cov(z),
    "pseudoinverse": torch.linalg.pinv,
    "vecdot": lambda z: torch.linalg.vecdot(z, z, dim=0),
    "resolved": lambda z: torch.view_as_real(z.conj().resolve_conj()),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_lazy_conjugates_are_computed(name: str) -> None:
    torch.manual_seed(0)
    same(COMPLEX[name], torch.randn(4, 3, dtype=torch.complex128))
    if name not in ("pseudoinverse", "covariance"):
        same(lambda x: torch.fft.hfft2(x), torch.randn(4, 5, dtype=torch.float64))


def test_lazy_tensors_are_resolved_when_they_become_global() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    placement = weft.placement("cpu", PAIR)
    x = weft.tensor(z.conj(), placement=placement, sbp=B)
    y = weft.from_local({0: z[:1].conj(), 1: z[1:].conj()}, placement=placement, sbp=S(0))
    for made in (x, y, x + z.conj() - z.conj()):
        assert (made * 1).full().tolist() == z.conj().tolist()


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.bool, torch.float16, torch.bfloat16]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_added_up_before_they_lose_anything(dtype: torch.dtype, ranks: int) -> None:
    """Casts, writes into narrower tensors, comparisons and steps of what is a sum over the ranks."""
    rows = torch.tensor([[0.7, 6e4, -1.0, 1.0], [0.6, 6e4, -1.0, -1.0]]).repeat(2, 1)
    rows[2:] *= torch.tensor([1.0, -1.0, 1.0, 1.0])
    total = rows.sum(0)
    placement = weft.placement("cpu", list(range(ranks)))
    x = weft.tensor(rows, placement=placement, sbp=S(0)).sum(0)
    assert x.sbp == (P(),)
    into = weft.zeros(4, dtype=dtype, placement=placement, sbp=B)
    for found, expected in (
        (x.to(dtype), total.to(dtype)),
        (into.copy_(x), total.to(dtype)),
        (x > 1, total > 1),
        (x.floor(), total.floor()),
        (x.long() // 2, total.long() // 2),
        (x == 0, total == 0),
    ):
        torch.testing.assert_close(found.full(), expected)


def test_averages_of_integers_are_rounded_once() -> None:
    rows = torch.randint(-50, 50, (8, 1, 4, 6))
    placement = weft.placement("cpu", PAIR)
    total = weft.tensor(rows, placement=placement, sbp=S(0)).sum(0, keepdim=True)
    assert total.sbp == (P(),)
    whole = rows.sum(0, keepdim=True)
    assert torch.equal(F.avg_pool2d(total, 2).full(), F.avg_pool2d(whole, 2))
    assert torch.equal(F.avg_pool1d(total[0], 2).full(), F.avg_pool1d(whole[0], 2))
    for sbp in (S(2), S(3)):
        x = weft.tensor(whole, placement=placement, sbp=sbp)
        for found, expected in (
            (F.avg_pool2d(x, 2), F.avg_pool2d(whole, 2)),
            (F.avg_pool3d(x, (1, 2, 2)), F.avg_pool3d(whole, (1, 2, 2))),
        ):
            assert found.dtype == torch.int64
            assert torch.equal(found.full(), expected)


MATRICES = {
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a.sum(1)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "lu_factor": lambda a: torch.linalg.lu_factor(a)[0],
    "ldl_factor": lambda a: torch.linalg.ldl_factor(a.detach() @ a.detach().mT)[0],
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -2),
    "tensorinv": lambda a: torch.linalg.tensorinv(a.view(4, 2, 2), ind=1),
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a.view(2, 2, 4), a[:2, :2]),
    "eigvals": lambda a: torch.linalg.eigvals(a).abs().sum(),
    "solve_ex": lambda a: torch.linalg.solve_ex(a, a.mT)[0],
    "lstsq": lambda a: torch.linalg.lstsq(a, a.mT).solution,
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_are_solved(name: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(4, 4, dtype=torch.float64) + 4 * torch.eye(4, dtype=torch.float64)
    gradients = name != "ldl_factor"
    same(MATRICES[name], a, gradients=gradients)
    same(MATRICES[name], a, grid=GRID, layouts=[(S(1), S(1)), (S(0), P())], gradients=gradients)


def test_singular_matrices_are_told() -> None:
    x = weft.zeros(2, 2, placement=weft.placement("cpu", PAIR), sbp=B)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(x)


PLAIN_INSIDE = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "product": lambda x: x.prod(1),
    "cumulative product": lambda x: x.cumprod(2),
    "cumulative maximum": lambda x: x.cummax(1).values,
    "trace": lambda x: x[0].trace(),
    "select scatter": lambda x: torch.select_scatter(x, x[:, 0], 1, 2),
    "slice scatter": lambda x: torch.slice_scatter(x, x[:, :2], 1, 1, 3),
    "diagonal scatter": lambda x: torch.diagonal_scatter(x, x[:, 0, :3], 0, 1, 2),
    "quantile": lambda x: torch.quantile(x, 0.3, dim=1),
    "nearest": lambda x: F.interpolate(x, 7, mode="nearest-exact"),
    "block diagonal": lambda x: torch.block_diag(x[0], x[1]),
    "norm": lambda x: x.norm(3),
    "vector norm": lambda x: torch.linalg.vector_norm(x, 2.5, dim=1),
    "distance": lambda x: F.pairwise_distance(x, x.flip(0) + 1, p=3),
    "multivariate gamma": lambda x: torch.mvlgamma(x + 3, 2),
    "margin": lambda x: F.multi_margin_loss(x[0], torch.tensor([0, 1, 1])),
    "tensor_split": lambda x: torch.tensor_split(x, torch.tensor([1, 2]), 1)[1],
}


@pytest.mark.parametrize("name", PLAIN_INSIDE)
def test_what_ops_make_themselves_is_the_same_on_all_ranks(name: str) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 4, dtype=torch.float64) + 0.5
    same(PLAIN_INSIDE[name], x, layouts=[(S(0),), (S(1),), (S(2),), (P(),)])
    same(PLAIN_INSIDE[name], x, grid=GRID, layouts=[(S(1), S(2)), (P(), S(0))])


VALUES = {
    "nonzero": lambda x: x.nonzero(),
    "masked select": lambda x: x.masked_select(x > 0),
    "boolean mask": lambda x: x[x > 0],
    "unique": lambda x: x.long().unique(),
    "bincount": lambda x: x.abs().long().flatten().bincount(),
    "repeat": lambda x: x.repeat_interleave(x.abs().long()[:, 0], 0),
    "all close": lambda x: torch.tensor(torch.allclose(x, x + 1e-9)),
}


@pytest.mark.parametrize("name", VALUES)
def test_ops_may_depend_on_values(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64) * 3
    expected = VALUES[name](x)
    for sbp in (S(0), S(1), B, P()):
        found = VALUES[name](weft.tensor(x, placement=weft.placement("cpu", PAIR), sbp=sbp))
        found = found.full() if isinstance(found, weft.GlobalTensor) else found
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_make_their_first_states(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = kind(3, 4, 2, batch_first=True, bidirectional=True).double()
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    placement = weft.placement("cpu", PAIR)
    ours = weft.distribute(copy.deepcopy(plain), placement, {"weight_ih_l0": S(0)})
    found = ours(weft.tensor(x, placement=placement, sbp=S(0)))[0]
    expected = plain(x)[0]
    torch.testing.assert_close(found.full(), expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full(), other.grad)


def test_convolutions_on_a_grid_with_fewer_channels_than_ranks() -> None:
    torch.manual_seed(0)
    placement = weft.placement("cpu", GRID)
    x, w, b = torch.randn(1, 3, 4, 4), torch.randn(3, 3, 3, 3), torch.randn(3)
    for laid in (
        ((S(1), S(1)), (B, B), (B, B)),
        ((S(2), S(2)), (P(), S(1)), (S(0), S(0))),
        ((B, B), (S(0), P()), (P(), B)),
        ((S(0), S(0)), (P(), B), (B, P())),
    ):
        given = [
            weft.tensor(t, placement=placement, sbp=sbp)
            for t, sbp in zip((x, w, b), laid, strict=True)
        ]
        for op in (F.conv2d, F.conv_transpose2d):
            torch.testing.assert_close(op(*given).full(), op(x, w, b), rtol=1e-4, atol=1e-4)
        flat = [given[0][:, :, 0], given[1][..., 0], given[2]]
        torch.testing.assert_close(F.conv1d(*flat).full(), F.conv1d(x[:, :, 0], w[..., 0], b))


@pytest.mark.parametrize("op", [torch.native_batch_norm, torch._native_batch_norm_legit])
@pytest.mark.parametrize("training", [True, False])
def test_statistics_have_the_dtype_that_kernels_give_them(op: object, training: bool) -> None:
    given = [torch.randn(4, 3, 5).bfloat16(), *(torch.ones(3).bfloat16() for _ in range(4))]
    placement = weft.placement("cpu", PAIR)
    found = op(*(weft.tensor(t, placement=placement, sbp=S(0)) for t in given), training, 0.1, 1e-5)
    expected = op(*given, training, 0.1, 1e-5)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
