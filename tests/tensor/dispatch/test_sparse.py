"""Sparse plain tensors and global ones: as of whole plain tensors, or refused in words."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import weft
from weft.errors import LayoutError, UserError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")
PAIR = weft.placement("cpu", [0, 1])
S, B = weft.split, weft.broadcast
FORMS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
}
USES = {
    "@": lambda a, w: a @ w,
    "mm": torch.sparse.mm,
    "matmul": lambda a, w: torch.matmul(a, w.t()),
    "mv": lambda a, w: a @ w[0],
    "addmm": lambda a, w: torch.addmm(w, a, w),
    "linear": lambda a, w: F.linear(a, w),
}


@pytest.mark.parametrize("sbp", [B, S(0), S(1)])
@pytest.mark.parametrize("form", FORMS)
def test_products_and_their_gradients(form, sbp):
    torch.manual_seed(0)
    values = torch.randn(4, 4)
    sparse = FORMS[form](torch.randn(4, 4) * (torch.rand(4, 4) > 0.5))
    with weft.local_world(2):
        for name, use in USES.items():
            plain, ours = values.clone(), weft.tensor(values, placement=PAIR, sbp=sbp)
            found = []
            for w in (plain, ours):
                made = use(sparse, w.requires_grad_())
                made.square().sum().backward()
                found.append([weft.whole(x) for x in (made.detach(), w.grad)])
            torch.testing.assert_close(found[1], found[0], msg=name)


def test_sums_and_writes():
    eye = torch.eye(4).to_sparse()
    with weft.local_world(2):
        x = weft.ones(4, 4, placement=PAIR, sbp=S(0))
        assert torch.equal((x + eye).full(), torch.ones(4, 4) + torch.eye(4))
        x.add_(eye)
        assert torch.equal(x.full(), torch.ones(4, 4) + torch.eye(4))


def test_what_is_refused():
    eye = torch.eye(4).to_sparse()
    with weft.local_world(2):
        x = weft.ones(4, 4, placement=PAIR, sbp=B)
        with pytest.raises(UserError, match=r"the result is torch\.sparse_coo.*x\.full\(\)"):
            x * eye
        with pytest.raises(LayoutError, match="wants a gradient"):
            eye.requires_grad_() @ x
