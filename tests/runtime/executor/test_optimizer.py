"""Updates of local shards against the same optimizer on the whole parameters."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from weft.errors import InternalError
from weft.ir.plan import LocalUpdate
from weft.runtime.executor.optimizer import OptimizerUpdates, group_updates
from weft.runtime.memory.state import Variables

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.1, "centered": True},
    "NAdam": {"lr": 0.1},
}


def parameters():
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(4, 3, generator=generator, dtype=torch.float64)
        for name in ("a.weight", "b.weight")
    }


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]


def optimizer_of(name, tensors, **options):
    a, b = (torch.nn.Parameter(tensor) for tensor in tensors)
    groups = [{"params": [a]}, {"params": [b], "lr": 0.01}]
    return getattr(torch.optim, name)(groups, **{**OPTIMIZERS[name], **options}), (a, b)


def updates(rule):
    return [
        LocalUpdate(rule, f"%{key}", f"%{key}.grad", (), group, key)
        for group, key in enumerate(("a.weight", "b.weight"))
    ]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_follow_the_whole_parameters_and_schedules(name, options):
    whole, leaves = optimizer_of(
        name, [tensor.clone() for tensor in parameters().values()], **options
    )
    user, _ = optimizer_of(name, [tensor.clone() for tensor in parameters().values()], **options)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (whole, user)]
    variables = Variables({key: tensor[1:3].clone() for key, tensor in parameters().items()})
    shards = OptimizerUpdates(user, updates(name), variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a schedule warns when no step went before
        for step in range(4):
            for leaf, gradient in zip(leaves, gradients(step), strict=True):
                leaf.grad = gradient
            whole.step()
            shards.run([gradient[1:3].t().contiguous().t() for gradient in gradients(step)])
            for schedule in schedules:
                schedule.step()
    for leaf, key in zip(leaves, ("a.weight", "b.weight"), strict=True):
        torch.testing.assert_close(variables[key], leaf.detach()[1:3], rtol=1e-12, atol=1e-14)
        expected = {
            f"{key}.{k}" for k, v in whole.state[leaf].items() if isinstance(v, torch.Tensor)
        }
        assert {k for k in variables if k.startswith(f"{key}.")} == expected
    assert not user.state


def test_states_that_are_given_are_gone_on_with():
    """Two steps at once equal one step, then another one by new updates on the states of the first."""
    found = []
    for restarts in (False, True):
        user, _ = optimizer_of("AdamW", list(parameters().values()))
        variables = Variables({key: tensor.clone() for key, tensor in parameters().items()})
        shards = OptimizerUpdates(user, updates("AdamW"), variables)
        shards.run(gradients(0))
        if restarts:
            shards = OptimizerUpdates(user, updates("AdamW"), variables)
        shards.run(gradients(1))
        found.append(variables)
    assert found[0]["a.weight.step"] == found[1]["a.weight.step"] == 2
    for key in found[0]:
        assert torch.equal(found[0][key], found[1][key]), key


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"foreach": True}, True), ({"foreach": False}, False), ({"fused": False}, False)],
)
def test_fused_kernels_where_the_user_left_it_open(options, fused):
    user, _ = optimizer_of("AdamW", list(parameters().values()), **options)
    shards = OptimizerUpdates(user, updates("AdamW"), Variables(parameters()))
    assert [group["fused"] for group in shards._optimizer.param_groups] == [fused] * 2
    assert user.param_groups[0]["fused"] is options.get("fused")


def test_gradients_keep_their_values_under_kernels_that_overwrite_them():
    """SGD with Nesterov's momentum adds to the gradients in its foreach kernel."""
    user, _ = optimizer_of(
        "SGD", list(parameters().values()), dampening=0, nesterov=True, foreach=True, weight_decay=0
    )
    shards = OptimizerUpdates(user, updates("SGD"), Variables(parameters()))
    for step in range(2):
        given = gradients(step)
        shards.run(given)
        assert all(torch.equal(a, b) for a, b in zip(given, gradients(step), strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_kernels_called_directly_do_what_a_step_does(name, monkeypatch):
    """Three steps by kernels, one by the optimizer itself (its rate is a tensor then), and two by kernels again."""
    whole, leaves = optimizer_of(name, [t.clone() for t in parameters().values()], fused=True)
    user, _ = optimizer_of(name, [t.clone() for t in parameters().values()])
    variables = Variables(parameters())
    shards = OptimizerUpdates(user, updates(name), variables)
    own_steps: list[int] = []
    inner = type(user).step.__get__(shards._optimizer)
    step = 0

    def noted():
        own_steps.append(step)
        return inner()

    monkeypatch.setattr(shards._optimizer, "step", noted)
    for step in range(6):
        rate = torch.tensor(0.05, dtype=torch.float64) if step == 3 else 0.1 / (step + 1)
        user.param_groups[1]["lr"], whole.param_groups[1]["lr"] = rate, float(rate)
        shards.run(gradients(step))
        for leaf, gradient in zip(leaves, gradients(step), strict=True):
            leaf.grad = gradient
        whole.step()
        for leaf, key in zip(leaves, parameters(), strict=True):
            assert torch.equal(leaf, variables[key]), (step, key)
    assert own_steps == [0, 3]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_overflow_leaves_everything_as_it_is(name, monkeypatch):
    """Where a fused kernel updates, it looks at the flag itself: the host does not wait for it."""
    whole, leaves = optimizer_of(name, [t.clone() for t in parameters().values()])
    user, _ = optimizer_of(name, [t.clone() for t in parameters().values()])
    variables = Variables(parameters())
    skipping = [replace(update, skip="%flag") for update in updates(name)]
    ((names, run),) = group_updates(skipping, variables, user)
    assert names[-1] == "%flag"
    read = []
    item = torch.Tensor.item
    for step, overflow in enumerate([1, 0, 1, 0, 1]):
        values = [torch.full_like(g, torch.inf) if overflow else g for g in gradients(step)]
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda x, at=step: read.append(at) or item(x))
            run([*values, torch.tensor(float(overflow))])
        if not overflow:
            for leaf, gradient in zip(leaves, gradients(step), strict=True):
                leaf.grad = gradient
            whole.step()
        for leaf, key in zip(leaves, parameters(), strict=True):
            assert torch.equal(leaf, variables[key]), (step, key)
            for state, value in whole.state[leaf].items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(variables[f"{key}.{state}"], value, rtol=0, atol=0)
    assert set(read) == {0, 1} if name != "RMSprop" else {0, 1, 2, 3, 4} <= set(read)


def test_a_hook_of_all_optimizers_sees_every_step():
    user, _ = optimizer_of("AdamW", list(parameters().values()))
    shards = OptimizerUpdates(user, updates("AdamW"), Variables(parameters()))
    shards.run(gradients(0))
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    try:
        shards.run(gradients(1))
    finally:
        hook.remove()
    assert seen == [1]


def test_copies_and_an_optimizer_join_by_rule():
    variables = Variables({"m": torch.zeros(2), **parameters()})
    copy = LocalUpdate("copy", "%m", "%new", (), 0, "m")
    user, _ = optimizer_of("SGD", list(parameters().values()))
    joined = group_updates([copy, *updates("SGD")], variables, user)
    assert [names for names, _ in joined] == [["%new"], ["%a.weight.grad", "%b.weight.grad"]]
    joined[0][1]([torch.ones(2)])
    assert variables["m"].tolist() == [1, 1]


def test_another_optimizer_than_the_plan_was_made_for_is_refused():
    user, _ = optimizer_of("SGD", list(parameters().values()))
    with pytest.raises(InternalError, match="updates by AdamW, but the optimizer is SGD"):
        group_updates(updates("AdamW"), Variables(parameters()), user)


def test_private_torch_apis_that_are_needed():
    assert "cpu" in _get_fused_kernels_supported_devices()
    for kernel in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_foreach_add_"):
        assert callable(getattr(torch, kernel)), kernel


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_empty_shard_is_no_harm(name):
    """A parameter with fewer rows than ranks leaves some ranks without a row."""
    user, _ = optimizer_of(name, list(parameters().values()))
    variables = Variables({"a.weight": torch.zeros(0, 3), "b.weight": torch.ones(1, 3)})
    shards = OptimizerUpdates(user, updates(name), variables)
    for _ in range(2):
        shards.run([torch.zeros(0, 3), torch.ones(1, 3)])
    assert variables["a.weight"].shape == (0, 3)
    assert (variables["b.weight"] < 1).all()
