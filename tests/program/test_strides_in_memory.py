"""What lies in memory otherwise than when the step was captured gives the losses and weights of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from single_device import assert_same_training, compiled, plain_training

pytestmark = pytest.mark.usefixtures("double_precision")

PAIR = [0, 1]


class After(nn.Module):
    """Any function behind a linear layer, with a group norm to use."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.GroupNorm(2, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum() / 100


def check(model: nn.Module, batch: Tensor, loss_fn: Any = loss) -> None:
    batches = [batch] * 3
    expected = plain_training(model, loss_fn, batches)
    with compiled(model, loss_fn, batch, PAIR, weft.data_parallel()) as program:
        assert_same_training(program, batches, expected)


def heads(x: Tensor) -> Tensor:
    """Two heads that lie with their depth outermost, once a rank has taken its part."""
    return x.mT.contiguous().mT.roll(1, 0).unflatten(-1, (2, 4)).transpose(1, 2)


TOKENS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "group norm": lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2),
    "sorted": lambda m, x: m.norm(
        x.transpose(1, 2).contiguous().transpose(1, 2).sort(0).values.transpose(1, 2)
    ),
    "rolled": lambda m, x: m.norm(
        x.transpose(1, 2).contiguous().transpose(1, 2).roll(1, 0).transpose(1, 2)
    ),
    "channels last": lambda m, x: m.norm(x.transpose(1, 2).unflatten(-1, (2, 2))),
    "layer norm": lambda m, x: F.layer_norm(x.transpose(1, 2), (4,)),
    "attention": lambda m, x: F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True),
}


@pytest.mark.parametrize("name", TOKENS)
def test_norms_and_attention_of_transposed_tokens(name: str) -> None:
    torch.manual_seed(0)
    check(After(TOKENS[name]), torch.randn(12, 4, 8))


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.GroupNorm])
def test_norms_of_one_image_on_each_rank(norm: type[nn.Module], contiguous: bool) -> None:
    """The strides of a batch of one tell kernels nothing of how it lies."""

    def function(m: Any, x: Tensor) -> Tensor:
        images = x.transpose(1, 2).unflatten(-1, (6, 5))
        made = m.norm(images.contiguous() if contiguous else images)
        rows = made.flatten(2).transpose(1, 2)
        return rows + rows.detach().cos() * torch.linspace(0, 2, 30)[:, None]

    torch.manual_seed(0)
    model = After(function)
    model.norm = nn.BatchNorm2d(8) if norm is nn.BatchNorm2d else nn.GroupNorm(2, 8)
    check(model, torch.randn(2, 30, 8))


MATRICES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.linalg.det,
    "transposed": lambda x: torch.linalg.det(x.mT),
    "transposed, logarithm": lambda x: torch.linalg.slogdet(x.mT)[1],
    "sorted": lambda x: torch.linalg.slogdet(x.sort(0).values.mT)[1],
    "rolled": lambda x: torch.linalg.det(x.mT.contiguous().mT.roll(1, 0)),
    "solved": lambda x: torch.linalg.solve(x.mT, x[..., :1]),
    "inverse": lambda x: torch.linalg.inv(x.mT),
}


@pytest.mark.parametrize("name", MATRICES)
def test_factors_of_matrices(name: str) -> None:
    """A determinant's factors are those of the transpose where the matrix is contiguous: its backward knows."""
    torch.manual_seed(0)
    function = MATRICES[name]
    model = After(lambda _, x: function(x.unflatten(-1, (4, 4))), width=16)
    check(model, torch.randn(6, 16))


SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "resolved": lambda x: torch.view_as_real(torch.fft.fft(x).conj().resolve_conj()),
    "imaginary": lambda x: torch.fft.fft(x).conj().imag,
    "imaginary of a slice": lambda x: torch.fft.fft(x).conj().imag[:, 1:3] * x[:, :1],
    "product": lambda x: (torch.fft.fft(x).conj() * torch.fft.ifft(x)).abs(),
    "gathered": lambda x: torch.fft.fft(x).conj().roll(1, 0).angle(),
    "hermitian": lambda x: torch.fft.hfft2(torch.fft.fft(x)),
    "written": lambda x: conjugate_doubled(torch.fft.fft(x)).abs(),
}


def conjugate_doubled(z: Tensor) -> Tensor:
    """What is written into a conjugate is in the tensor that it is a view of."""
    z = z.clone()
    z.conj().mul_(2 + 1j)
    return z


@pytest.mark.parametrize("name", SPECTRA)
def test_values_that_are_conjugated_or_negated_when_they_are_read(name: str) -> None:
    torch.manual_seed(0)
    function = SPECTRA[name]
    check(After(lambda _, x: function(x), width=6), torch.randn(4, 6))


@pytest.mark.parametrize("form", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_a_batch_that_is_conjugated_or_negated_when_it_is_read(
    form: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    batch = form(torch.randn(4, 3, dtype=torch.complex128))

    def weighted(model: nn.Module, batch: Tensor) -> Tensor:
        part = batch.imag if batch.is_complex() else batch
        return (model(part.roll(1, 0)) * part).sum()

    check(nn.Linear(3, 3), batch, weighted)
