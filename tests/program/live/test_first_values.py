"""Modules on the meta device are filled by their own way, or by that of the model around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import weft
from weft.errors import UserError
from weft.program.live.live import check_initial_values, initial_values

CPU = torch.device("cpu")


class Turning(nn.Module):
    """A buffer that no file has, as rotary embeddings have it; it is made when the module is."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("frequencies", self.made(size), persistent=False)

    @staticmethod
    def made(size: int) -> Tensor:
        return 1.0 / 10 ** torch.arange(size)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(self.frequencies)


class Filling(nn.Module):
    """A model with a way to fill the modules in it, as those of transformers have one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Turning())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Turning):
            module.frequencies.copy_(Turning.made(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Idle(Filling):
    """Its way leaves buffers as they are."""

    def _init_weights(self, module: nn.Module) -> None: ...


class Half(nn.Linear):
    """Fills its parameters, and forgets a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(2), persistent=False)


def meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


def test_the_nearest_way_counts() -> None:
    model = meta(Filling)
    check_initial_values(model, CPU, {"inner.0.weight", "inner.0.bias"})
    found = {
        key: value
        for key, _, value in initial_values(
            model, CPU, lambda fill: fill(), {"inner.0.weight", "inner.0.bias"}
        )
    }
    assert found["inner.0.weight"] is None
    values = found["inner.1.frequencies"]
    assert values is not None
    assert torch.equal(values, Turning.made(4))
    assert all(tensor.is_meta for tensor in model.buffers())


def test_a_trial_draws_nothing() -> None:
    class Drawing(Filling):
        def _init_weights(self, module: nn.Module) -> None:
            for buffer in module.buffers(recurse=False):
                buffer.normal_()

    before = torch.get_rng_state()
    check_initial_values(meta(Drawing), CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "named"),
    [(Idle, "inner.1.frequencies"), (Half, "scale"), (Turning, "frequencies")],
    ids=["idle", "half", "none"],
)
def test_what_nobody_fills_is_named(make: Any, named: str) -> None:
    with pytest.raises(UserError, match=rf"^{named} are on the meta device.*_init_weights"):
        check_initial_values(meta(make), CPU)


def test_a_model_trains_with_weights_of_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Filling()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(8, 4)
    model = meta(Filling)
    with weft.local_world(2):
        program = weft.compile(
            *(model, lambda net, x: net(x).square().mean(), torch.optim.SGD(model.parameters()), x),
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
            weights=tmp_path,
        )
        found = program.step(x).item()
        program.close()
    assert found == pytest.approx(plain(x).square().mean().item(), rel=1e-5)
