"""Random ops on global tensors do not depend on the layout."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.runtime.random import uniform

S, B, P = weft.split, weft.broadcast, weft.partial
WHERE = [
    ([0], S(0)),
    ([0, 1], S(0)),
    ([0, 1], S(1)),
    ([0, 1], B),
    ([0, 1], P()),
    ([[0, 1], [2, 3]], (S(1), S(0))),
]
DRAWS = {
    "rand": lambda **at: weft.rand(5, 6, **at),
    "randn": lambda **at: weft.randn(5, 6, **at),
    "dropout": lambda **at: F.dropout(weft.ones(5, 6, **at), 0.4),
    "bernoulli": lambda **at: torch.bernoulli(weft.full((5, 6), 0.3, **at)),
    "normal_": lambda **at: weft.zeros(5, 6, **at).normal_(1, 2),
    "uniform_": lambda **at: weft.zeros(5, 6, **at).uniform_(-1, 1),
    "randn_like": lambda **at: torch.randn_like(weft.zeros(5, 6, **at)),
    "randint_like": lambda **at: torch.randint_like(weft.zeros(5, 6, **at), 9),
    "attention": lambda **at: F.scaled_dot_product_attention(
        *weft.ones(3, 2, 5, 6, placement=at["placement"], sbp=B).unbind(0), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_numbers_in_every_layout(name):
    found = []
    with weft.local_world(4):
        for grid, sbp in WHERE:
            weft.manual_seed(3)
            at = {"placement": weft.placement("cpu", grid), "sbp": sbp}
            found.append(DRAWS[name](**at).full())
            again = DRAWS[name](**at).full()
            assert not torch.equal(again, found[-1])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_draws_are_those_of_the_compiled_path():
    with weft.local_world(2):
        weft.manual_seed(5)
        at = {"placement": weft.placement("cpu", [0, 1]), "sbp": S(0)}
        for salt in range(2):
            expected = uniform(5, 0, (4, 3), (0, 0), (4, 3), salt)
            assert torch.equal(weft.rand(4, 3, **at).full(), expected)


def test_torchs_seed_starts_anew():
    with weft.local_world(2):
        weft.manual_seed(None)
        at = {"placement": weft.placement("cpu", [0, 1]), "sbp": S(0)}
        draws = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            draws.append(weft.rand(4, **at).full())
    assert torch.equal(draws[0], draws[2])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(draws))
