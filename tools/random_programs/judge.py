"""One script, judged: trained by weft and by plain PyTorch, every result compared."""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

import weft
from tools.random_programs.rounding import Rounded
from weft.errors import UserError

Kind = Literal["right", "sensitive", "refused", "wrong", "internal", "hang", "invalid"]
TIMEOUT = 20.0  # seconds that a rank waits for its peers
SEED = 3
ROUNDINGS = 5  # times that the reference is rounded otherwise, where a result differs
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and in one line why."""

    kind: Kind
    why: str = ""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}\n{self.details}".strip()


def judge(script: Mapping[str, Any]) -> Verdict:
    """Run a script both ways. The reference has copies of model and optimizer made before weft sees them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judged(script)


def _judged(script: Mapping[str, Any]) -> Verdict:
    try:
        expected = _expected(script, 0.0)
    except Exception as error:
        return Verdict("invalid", _line(error), traceback.format_exc())
    try:
        found = _by_weft(script, script["STRATEGY"], script["GRID"])
    except Exception as error:
        kind: Kind = "refused" if _refusal(error) else "internal"
        return Verdict(kind, _line(error), _chain(error))
    return _compared(script, found, expected)


def _expected(script: Mapping[str, Any], nudge: float) -> Results:
    """What plain PyTorch makes; weft on one rank where random numbers are drawn.

    Args:
        script: the case.
        nudge: by what share parameters are off at the beginning, for how much that changes.
    """
    if not script["RANDOM"]:
        return _plainly(script, nudge)
    strategy = script["STRATEGY"]
    alone = weft.Strategy(clip_norm=strategy.clip_norm, precision=strategy.precision)
    return _by_weft(script, alone, [0], nudge)


def _made(script: Mapping[str, Any], nudge: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = script["make_model"]()
    if nudge:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + nudge * noise.to(parameter.dtype))
    return copy.deepcopy((model, script["make_optimizer"](model)))


def _plainly(
    script: Mapping[str, Any],
    nudge: float,
    rounded: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Results:
    model, optimizer = _made(script, nudge)
    strategy, found = script["STRATEGY"], Results()
    autocast: Callable[[], Any] = nullcontext
    if strategy.precision is not None:
        autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    for number, (samples, update, rate) in enumerate(script["STEPS"]):
        _scale_rates(optimizer, rate)
        batch = script["make_batch"](number, samples)
        with rounded():
            with autocast():
                result = script["loss_fn"](model, batch)
            _loss_of(result).backward()
        if update:
            if strategy.clip_norm is not None:
                every = [p for group in optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(every, strategy.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        found |= _leaves(f"step {number}", result)
    found |= {f"state {name}": tensor.clone() for name, tensor in model.state_dict().items()}
    if script["EVALUATES"]:
        model.eval()
        batch = _last_batch(script)
        with rounded(), torch.no_grad(), autocast():
            found |= _leaves("evaluation", script["loss_fn"](model, batch))
    return found


def _by_weft(script: Mapping[str, Any], strategy: Any, grid: Any, nudge: float = 0.0) -> Results:
    model, optimizer = _made(script, nudge)
    found = Results()
    with weft.local_world(torch.tensor(grid).numel(), timeout=TIMEOUT):
        program = weft.compile(
            model,
            script["loss_fn"],
            optimizer,
            script["make_batch"](0, script["STEPS"][0][0]),
            placement=weft.placement("cpu", grid),
            strategy=strategy,
            seed=SEED,
        )
        try:
            for number, (samples, update, rate) in enumerate(script["STEPS"]):
                _scale_rates(optimizer, rate)
                result = program.step(script["make_batch"](number, samples), update=update)
                found |= _leaves(f"step {number}", result)
            state = program.full_state_dict()
            found |= {f"state {name}": tensor.clone() for name, tensor in state.items()}
            if script["EVALUATES"]:
                batch = _last_batch(script)
                evaluation = program.evaluation(script["loss_fn"], batch)
                found |= _leaves("evaluation", evaluation.step(batch))
                evaluation.close()
        finally:
            program.close()
    return found


def _scale_rates(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups if rate != 1.0 else ():
        group["lr"] = group["lr"] * rate


def _last_batch(script: Mapping[str, Any]) -> Any:
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


def _compared(script: Mapping[str, Any], found: Results, expected: Results) -> Verdict:
    if list(found) != list(expected):
        return Verdict("wrong", "other results", f"found {list(found)}\nexpected {list(expected)}")
    limit = script["LIMIT"]
    off = {name: _distance(found[name], expected[name]) for name in expected}
    worst = {name: far for name, far in off.items() if not far <= limit}
    if not worst:
        return Verdict("right")
    details = "\n".join(f"{name}: {far:.1e}" for name, far in worst.items())
    spread = _spread(script, expected)
    beyond = {name: far for name, far in worst.items() if not far <= 30 * spread.get(name, 0.0)}
    if not beyond:
        return Verdict("sensitive", next(iter(worst)), details)
    first = next(iter(beyond))
    return Verdict("wrong", f"{first} differs by {beyond[first]:.1e}", details)


def _spread(script: Mapping[str, Any], expected: Results) -> dict[str, float]:
    """How far results move when sums are rounded otherwise, or parameters are a little off at the beginning."""
    unit = 1e-3 if script["STRATEGY"].precision else 1e-13 if script["LIMIT"] < 1e-6 else 3e-7
    found: dict[str, float] = {}
    others = [_expected(script, unit * scale) for scale in (1.0, -1.0, 3.0)]
    if not script["RANDOM"]:
        others += [_plainly(script, 0.0, partial(Rounded, seed)) for seed in range(ROUNDINGS)]
    for other in others:
        for name in expected:
            found[name] = max(found.get(name, 0.0), _distance(other[name], expected[name]))
    return found


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite where kinds differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    same = (found == expected) | (found.isnan() & expected.isnan())
    difference = torch.where(same, torch.zeros_like(found), found - expected).abs().max()
    finite = expected[expected.isfinite()]
    scale = max(finite.abs().max().item() if finite.numel() else 0.0, 1e-3)
    far = difference.item() / scale
    return far if far == far else float("inf")


def _refusal(error: BaseException) -> bool:
    return isinstance(error, UserError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _line(error: Exception) -> str:
    """Kind and message in one line, with the last line of weft's code where it is no refusal."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    if _refusal(error):
        return text
    last = [*_causes(error)][-1]
    frames = traceback.extract_tb(last.__traceback__)
    ours = [frame for frame in frames if "weft" in Path(frame.filename).parts]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    cause = (
        "" if last is error else f" <- {type(last).__name__}: {' '.join(str(last).split())[:300]}"
    )
    return f"{text}{cause} at {where}"


def _chain(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def cause(verdict: Verdict) -> str:
    """What verdicts of one cause have in common: the message without names and numbers."""
    text = re.sub(r"<program \d+>:\d+: .*?  ", "", verdict.why)
    text = re.sub(r"\bb\d+(\.\w+)*", "M", text)
    text = re.sub(r"\[[\d, ]*\]|\d+(\.\d+)?(e-?\d+)?", "N", text)
    return f"{verdict.kind}: {text[:160]}"
