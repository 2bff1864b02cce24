"""What a live model cannot do is said in words that name what would do."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import weft
from program.live_models import Net, batch, eager_step, loss_fn, twins
from single_device import adamw
from weft.errors import LayoutError, UserError

PAIR = weft.placement("cpu", [0, 1])


def test_a_scaler_of_gradients_is_refused() -> None:
    with twins("data") as both:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_fn(both.model, batch(1))).backward()
        with pytest.raises(LayoutError, match=r"GradScaler.*weft\.Precision\(compute=.fp16"):
            scaler.unscale_(both.optimizer)


def test_copies_of_before_compiling_do_not_follow() -> None:
    torch.manual_seed(0)
    model = Net()
    before: Any = torch.optim.swa_utils.AveragedModel(model)
    with twins("data", lambda: model) as both:
        words = r"are made after weft\.compile"
        with pytest.raises(LayoutError, match=words):
            before.update_parameters(both.model)
        with pytest.raises(LayoutError, match=words), torch.no_grad():
            nn.Linear(6, 8).double().weight.lerp_(both.model.first.weight, 0.1)
        after = torch.optim.swa_utils.AveragedModel(both.model)
        after.update_parameters(both.model)


@pytest.mark.parametrize(
    "save",
    [
        lambda model, _: torch.save(model, io.BytesIO()),
        lambda _, optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda model, _: pickle.dumps(model.first.weight),
        lambda model, _: model.first.weight.detach().numpy(),
    ],
)
def test_what_cannot_be_pickled_names_what_can(save: Callable[[Any, Any], Any]) -> None:
    words = r"full_state_dict.*full_optimizer_state_dict.*weft\.release\(model, optimizer\)"
    with twins("zero 3") as both:
        both.step()
        with pytest.raises(UserError, match=words):
            save(both.model, both.optimizer)
    with twins("data") as both:  # each process has all of it
        both.step()
        save(both.model, both.optimizer)


def test_an_identity_is_written_to_a_live_parameter() -> None:
    with twins("zero 3") as both:
        both.both(lambda model, _: nn.init.eye_(model.first.weight))
        both.step()
        both.check()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["one rank", "data"])
@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("lr", "0.1", "'0.1', but must be a number"),
        ("lr", None, "None, but must be a number"),
        ("betas", (0.9,), r"\(0.9,\), but must be numbers, like"),
    ],
)
def test_hyperparameters_that_are_no_numbers_are_named(
    name: str, when: str, key: str, value: Any, takes: str
) -> None:
    def wrong(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.param_groups[0][key] = value
        return optimizer

    words = f"parameter group 0 of AdamW: '{key}' is {takes}"
    if when == "before":
        with pytest.raises(UserError, match=words), twins(name, make_optimizer=wrong):
            pass
        return
    with twins(name) as both:
        both.step()
        usual = both.optimizer.param_groups[0][key]
        both.optimizer.param_groups[0][key] = value
        for call in (lambda: both.program.step(batch(1)), both.program.update):
            with pytest.raises(UserError, match=words):
                call()
        both.optimizer.param_groups[0][key] = usual
        both.step()
        both.check()


def test_hyperparameters_may_be_tensors_and_numbers_of_other_kinds() -> None:
    with twins("data") as both:
        both.step()
        for rate in (torch.tensor(0.05, dtype=torch.float64), 1, 0.01):
            for one in (both.optimizer, both.other):
                one.param_groups[0]["lr"] = rate
            both.step()
        both.check()


@pytest.mark.parametrize("kind", ["weight_norm", "prune"])
def test_tensors_that_modules_compute_and_keep_are_named(kind: str) -> None:
    def made() -> nn.Module:
        model = Net().double()
        if kind == "prune":
            prune.l1_unstructured(model.first, "weight", 0.5)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is deprecated
                nn.utils.weight_norm(model.first)
        return model

    def compiled(model: nn.Module) -> weft.Program:
        return weft.compile(model, loss_fn, adamw(model), batch(0), placement=PAIR)

    torch.manual_seed(0)
    model: Any = made()
    torch.manual_seed(0)
    plain = made()
    other = adamw(plain)
    words = (
        r"needs its values: first\.weight is kept by its module.*old torch\.nn\.utils\.weight_norm.* "
        r"torch\.nn\.utils\.parametrizations\.weight_norm .*prune\.remove.*detach\(\)"
    )
    with weft.local_world(2):
        with pytest.raises(UserError, match=words):
            compiled(model)
        model.first.weight = model.first.weight.detach()
        program = compiled(model)
        for seed in (1, 2):
            found = program.step(batch(seed)).item()
            assert found == pytest.approx(eager_step(plain, other, batch(seed)), rel=1e-9)
        program.close()


def test_a_lazy_module_is_called_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False))
    with weft.local_world(2):

        def compiled() -> weft.Program:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return weft.compile(model, loss_fn, optimizer, batch(0), placement=PAIR)

        with pytest.raises(
            UserError, match=r"1\.running_mean has no shape yet.*call the model once"
        ):
            compiled()
        model(batch(0)["x"].float())
        model.double()
        program = compiled()
        program.step(batch(1))
        program.close()


def test_a_tensor_is_no_module() -> None:
    with weft.local_world(2), pytest.raises(UserError, match=r"takes a module.*weft\.tensor"):
        weft.distribute(torch.ones(3), PAIR)  # type: ignore[type-var]
