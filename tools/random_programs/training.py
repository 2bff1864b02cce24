"""A script's program, trained by plain PyTorch and by weft; results have the same names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

import weft
from tools.random_programs.changes import changed

# Seconds that a rank waits for its peers. On a machine at many times its load, 20 have passed with no act.
TIMEOUT = 60.0
SEED = 3
Script = Mapping[str, Any]
Results = dict[str, Tensor]


def plainly(
    script: Script,
    nudge: float,
    rounded: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Results:
    """By plain PyTorch.

    Args:
        script: the case.
        nudge: by what share parameters are off at the beginning.
        rounded: what forward and backward run in.
    """
    model, optimizers = _made(script, nudge)
    strategy, found = script["STRATEGY"], Results()
    autocast: Callable[[], Any] = nullcontext
    if strategy.precision is not None:
        autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    for number, (samples, update, rate, change) in enumerate(script["STEPS"]):
        _scale_rates(optimizers, rate)
        batch = script["make_batch"](number, samples)
        with changed(change, model, optimizers):
            with rounded():
                with autocast():
                    result = script["loss_fn"](model, batch)
                _loss_of(result).backward()
            found |= _leaves(f"step {number}", result)
            if change == "held" or not update:
                found |= _gradients(f"step {number}", model, optimizers)
            if update:
                norm = _update(model, optimizers, strategy.clip_norm)
                found |= {f"step {number} norm": norm} if script["METRICS"] else {}
    found |= {f"state {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    found |= _states(model, optimizers)
    if script["EVALUATES"]:
        model.eval()
        batch = _last_batch(script)
        with rounded(), torch.no_grad(), autocast():
            found |= _leaves("evaluation", script["loss_fn"](model, batch))
    return found


def _update(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], clip_norm: float | None
) -> Tensor:
    """The norm of all gradients before they are clipped."""
    limit = float("inf") if clip_norm is None else clip_norm
    norm = nn.utils.clip_grad_norm_(_updated(optimizers), limit)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return norm


def by_weft(script: Script, strategy: Any, grid: Any, nudge: float = 0.0) -> Results:
    """By weft on the ranks of a grid."""
    model, optimizers = _made(script, nudge)
    found = Results()

    def compiled(strategy: weft.Strategy, batch: Any) -> Any:
        return weft.compile(
            model,
            script["loss_fn"],
            optimizers if len(optimizers) > 1 else optimizers[0],
            batch,
            placement=weft.placement("cpu", grid),
            strategy=strategy,
            seed=SEED,
            metrics=["grad_norm"] if script["METRICS"] else [],
        )

    with weft.local_world(torch.tensor(grid).numel(), timeout=TIMEOUT):
        program = compiled(strategy, script["make_batch"](0, script["STEPS"][0][0]))
        try:
            for number, (samples, update, rate, change) in enumerate(script["STEPS"]):
                _scale_rates(optimizers, rate)
                batch = script["make_batch"](number, samples)
                if change == "moved":
                    program.close()
                    program = compiled(alone(strategy), batch)
                if change == "verified":
                    program.verify(batch)
                with changed(change, model, optimizers):
                    held = change == "held" or not update
                    found |= _leaves(f"step {number}", program.step(batch, update=not held))
                    found |= _gradients(f"step {number}", model, optimizers) if held else {}
                    if update and held:
                        program.update()
                    if update and script["METRICS"]:
                        found[f"step {number} norm"] = program.metrics["grad_norm"].clone()
            state = program.full_state_dict()
            found |= {f"state {name}": tensor.clone() for name, tensor in state.items()}
            found |= _states(model, optimizers)
            if script["EVALUATES"]:
                batch = _last_batch(script)
                evaluation = program.evaluation(script["loss_fn"], batch)
                found |= _leaves("evaluation", evaluation.step(batch))
                evaluation.close()
        finally:
            program.close()
    return found


def alone(strategy: weft.Strategy) -> weft.Strategy:
    """What of a strategy decides results."""
    return weft.Strategy(clip_norm=strategy.clip_norm, precision=strategy.precision)


def _made(script: Script, nudge: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = script["make_model"]()
    if nudge:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + nudge * noise.to(parameter.dtype))
    made = script["make_optimizer"](model)
    optimizers = made if isinstance(made, list) else [made]
    return copy.deepcopy((model, optimizers))


def _scale_rates(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups if rate != 1.0 else ():
        group["lr"] = group["lr"] * rate


def _last_batch(script: Script) -> Any:
    return script["make_batch"](99, script["STEPS"][-1][0])


def _loss_of(result: Any) -> Tensor:
    found = result["loss"] if isinstance(result, dict) else result
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def _leaves(where: str, result: Any) -> Results:
    leaves, _ = tree_flatten_with_path(result)
    return {
        where + keystr(path): leaf.detach().clone()
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    }


def _gradients(where: str, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Results:
    """Of the parameters that an optimizer updates; a program keeps no others."""
    updated = {id(parameter) for parameter in _updated(optimizers)}
    return {
        f"{where} {name}.grad": _whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and id(parameter) in updated
    }


def _updated(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _states(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Results:
    """What optimizers keep. Torch's fused kernels, which weft prefers, count steps in float32."""
    return {
        f"state {name}.{key}": _whole(value).double() if key == "step" else _whole(value)
        for optimizer in optimizers
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full() if isinstance(tensor, weft.GlobalTensor) else tensor
    return whole.detach().clone()
