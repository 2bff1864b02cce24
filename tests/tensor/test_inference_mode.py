"""Global tensors under `torch.inference_mode()` do what plain ones do there, and behind it."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weft

PAIR = weft.placement("cpu", [0, 1])
S, B = weft.split, weft.broadcast

VIEWS = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(2, 8),
    "reshape that copies": lambda w: w.t().reshape(2, 8),
    "index": lambda w: w[0],
    "slice": lambda w: w[1:3, ::2],
    "select": lambda w: w.select(1, 2),
    "unbind": lambda w: w.unbind(),
    "iteration": list,
    "chunk": lambda w: w.chunk(2),
    "split": lambda w: w.split([1, 3], 1),
    "tensor_split": lambda w: w.tensor_split(3),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "movedim": lambda w: w.movedim(0, 1),
    "unflatten": lambda w: w.unflatten(0, (2, 2)),
    "squeeze": lambda w: w[:1].squeeze(0),
    "diagonal": lambda w: w.diagonal(),
    "expand": lambda w: w[None].expand(3, 4, 4),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 4)),
    "complex": lambda w: torch.view_as_complex(w.view(4, 2, 2)).real,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "same dtype": lambda w: w.to(w.dtype),
    "other dtype": lambda w: w.double(),
    "product": lambda w: torch.ones(2, 4) @ w.t(),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, torch.ones(3, 4)),
}
WRITES = {
    "add_": lambda w: w.add_(1),
    "subtract_": lambda w: w.subtract_(1),
    "copy_": lambda w: w.copy_(torch.ones(4, 4)),
    "row": lambda w: w[0].fill_(3),
    "item": lambda w: w.__setitem__((slice(None), 2), 5.0),
    "mask": lambda w: w.__setitem__(w > 0, 0.0),
    "transposed": lambda w: w.mT[1].add_(1),
    "chunk": lambda w: w.chunk(2)[1].neg_(),
    "copied view": lambda w: w.view(-1)[3:7].add_(1),
    "detached": lambda w: w.detach().sub_(1),
    "out": lambda w: torch.add(w, 1, out=w),
    "init": nn.init.zeros_,
}


def seen(value):
    """A value as numbers of Python, those of all ranks; of an error its first words."""
    if isinstance(value, list | tuple):
        return [seen(part) for part in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def tried(call):
    try:
        return seen(call())
    except (RuntimeError, weft.errors.UserError) as error:
        return str(error)[:40]


def added(x):
    with torch.no_grad():
        return x.add_(1)


def trained(x):
    factor = torch.ones((), requires_grad=True)
    (x * factor).sum().backward()
    return factor.grad


def behind(x):
    """What a result is good for when the block is left."""
    facts = [x.is_inference(), x.requires_grad]
    return [
        *facts,
        *(tried(lambda use=use: use(x)) for use in (added, lambda x: x.add_(1), trained)),
    ]


def used(tensor, use, inside):
    with torch.inference_mode():
        tensor = tensor * 1 if inside else tensor
        made = use(tensor)
        during = [tried(lambda: made), tried(lambda: tensor), tensor.is_inference()]
    first = made[0] if isinstance(made, list | tuple) else made
    after = behind(first) if isinstance(first, torch.Tensor) and first is not tensor else []
    return [*during, *after, seen(tensor.detach())]


@pytest.mark.parametrize("of", ["a leaf", "a tensor", "one made inside"])
@pytest.mark.parametrize("sbp", [B, S(0), S(1)])
def test_views_and_writes_beside_plain_tensors(sbp, of):
    values = torch.arange(16.0).reshape(4, 4) - 5
    with weft.local_world(2):
        for name, use in {
            **VIEWS,
            **{f"write {key}": each for key, each in WRITES.items()},
        }.items():
            whole, ours = values.clone(), weft.tensor(values, placement=PAIR, sbp=sbp)
            found = [
                used(x.requires_grad_(of == "a leaf"), use, of == "one made inside")
                for x in (whole, ours)
            ]
            assert found[0] == found[1], name


def test_a_live_model_in_inference_mode_between_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    x = torch.randn(4, 4, dtype=torch.float64)

    def loss(model, x):
        return model(x).square().mean()

    with weft.local_world(2):
        program = weft.compile(model, loss, optimizers[0], x, placement=PAIR)
        for _ in range(2):
            views = []
            for each in (model, plain):
                with torch.inference_mode():
                    views.append(each[0].weight.t())
                    views.append(torch.stack([row @ x[0] for row in each[0].weight]))
                    each[0].weight[1].mul_(2)
            program.step(x)
            loss(plain, x).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for ours, theirs in zip(views[:2], views[2:], strict=True):
                torch.testing.assert_close(ours.detach().full(), theirs.detach())
            torch.testing.assert_close(program.full_state_dict(), dict(plain.state_dict()))
        program.close()
