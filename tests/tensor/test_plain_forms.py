"""Global tensors in code that wants plain ones: numpy, pickles, other libraries' files, `weft.whole`."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import weft
from weft.errors import UserError

PAIR = weft.placement("cpu", [0, 1])
S, B, P = weft.split, weft.broadcast, weft.partial


class Tied(nn.Module):
    """With one weight under two names, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.arange(3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def program(model, strategy=None):
    def loss(model, x):
        return model(x).square().mean()

    optimizer = torch.optim.AdamW(model.parameters())
    made = weft.compile(model, loss, optimizer, torch.ones(4, 4), placement=PAIR, strategy=strategy)
    made.step(torch.ones(4, 4))
    return made


def test_numpy_reads_what_is_whole():
    with weft.local_world(2):
        whole = torch.arange(6.0).view(2, 3)
        x = weft.tensor(whole, placement=PAIR, sbp=B)
        assert np.array_equal(x.numpy(), whole.numpy())
        assert np.asarray(x, dtype=np.int64).dtype == np.int64
        assert np.array(x).flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            x.numpy()[0, 0] = 1
        x.mul_(2)
        assert np.asarray(x).sum() == 30
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            x.numpy()
        assert x.numpy(force=True).shape == (2, 3)
        assert torch.equal(torch.from_dlpack(x.detach()), 2 * whole)


@pytest.mark.parametrize("sbp", [S(0), P()])
@pytest.mark.parametrize(
    "use",
    [lambda x: x.numpy(), np.asarray, pickle.dumps, lambda x: x.data_ptr(), torch.from_dlpack],
)
def test_parts_are_refused_and_the_remedy_named(use, sbp):
    with weft.local_world(2):
        x = weft.ones(4, 2, placement=PAIR, sbp=sbp)
        with pytest.raises(UserError, match=r"a part of it only.*x\.full\(\).*full_state_dict\(\)"):
            use(x)
        assert weft.whole(x).tolist() == torch.ones(4, 2).tolist()


def test_one_rank_along_an_axis_has_all():
    with weft.local_world(2):
        x = weft.ones(2, placement=weft.placement("cpu", [[0, 1]]), sbp=(S(0), B))
        assert x.numpy().tolist() == [1, 1]


def test_pickles_hold_plain_tensors_of_their_own():
    with weft.local_world(2):
        weight = weft.distribute(nn.Linear(64, 64), PAIR).weight
        found = pickle.loads(pickle.dumps(weight))
        assert type(found) is nn.Parameter
        assert found.requires_grad
        assert torch.equal(found, weight.full())
        file = io.BytesIO()
        torch.save({"row": weight[0]}, file)
        assert len(file.getvalue()) < 4096
        with pytest.raises(UserError, match=r"copy\.deepcopy and x\.clone\(\)"):
            copy.copy(weight)


def test_a_live_model_is_saved_by_other_libraries(tmp_path):
    model = Tied()
    with weft.local_world(2):
        made = program(model)
        expected = made.full_state_dict()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        found = torch.load(file, weights_only=True)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        own = {key: x for key, x in model.state_dict().items() if key != "last.weight"}
        save_file(own, tmp_path / "own.safetensors")
        with pytest.raises(RuntimeError, match="share memory"):  # as of a plain model
            save_file(model.state_dict(), tmp_path / "all.safetensors")
        save_model(model, str(tmp_path / "model.safetensors"))
        for name in ("own", "model"):
            found = load_file(tmp_path / f"{name}.safetensors")
            assert len(found) == len(own)
            assert all(torch.equal(x, expected[key]) for key, x in found.items())
        made.close()


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_whole_copies_of_a_model_in_parts(tmp_path):
    model = Tied()
    with weft.local_world(2):
        made = program(model, weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3)))
        with pytest.raises(UserError, match=r"full_state_dict\(\)"):
            save_model(model, str(tmp_path / "model.safetensors"))
        copied = weft.whole(model)
        assert isinstance(model.first.weight, weft.GlobalTensor)
        assert copied.last.weight is copied.first.weight
        assert all(type(x) is nn.Parameter for x in copied.parameters())
        x = torch.randn(3, 4)
        torch.testing.assert_close(copied(x), model(x).full())
        state = weft.whole({"model": model.state_dict(), "epoch": 3, "plain": x})
        assert state["epoch"] == 3
        assert state["plain"] is x
        assert torch.equal(state["model"]["first.weight"], copied.first.weight)
        weft.whole(model.first.weight).sum().backward()
        assert model.first.weight.grad.full().tolist() == torch.ones(4, 4).tolist()
        made.close()


def test_on_one_device_all_is_whole_already():
    x, model = torch.ones(2), nn.Linear(2, 2)
    assert weft.whole(x) is x
    assert torch.equal(weft.whole(model).weight, model.weight)
