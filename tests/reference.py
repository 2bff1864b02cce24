"""Runs a logical graph op by op with plain torch on whole tensors: the oracle that tests compare with eager code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tools.oracles import meanings as check_recurrent
from weft.ir import LogicalGraph
from weft.ir.logical import Call, Input, Output, Ref, Update
from weft.ops import Token

Key = tuple[str, str]  # (role, key)


@dataclass(frozen=True)
class Result:
    """Outputs by key, gradients by parameter, and the new contents of written buffers by key."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def draw(size: list[int], offset: list[int], length: list[int], salt: int, **kwargs: Any) -> Any:
    """Stand-in for `weft.uniform`: the same block whatever the offset."""
    generator = torch.Generator().manual_seed(salt)
    whole = torch.rand(list(size), dtype=kwargs["dtype"], generator=generator)
    for dim, (start, count) in enumerate(zip(offset, length, strict=True)):
        whole = whole.narrow(dim, start, count)
    return whole


def zeros(size: list[int], offset: list[int], length: list[int], salt: int, **kwargs: Any) -> Any:
    """Stand-in for `weft.uniform` under which dropout keeps everything."""
    return torch.zeros(list(length), dtype=kwargs["dtype"])


def run_graph(
    graph: LogicalGraph, inputs: Mapping[Key, torch.Tensor], uniform: Callable[..., Any] = draw
) -> Result:
    """Run one step; `inputs` are found by (role, key), states are not needed."""
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    result = Result({}, {}, {})
    for node in graph.nodes:
        match node:
            case Input(value=value, role=role, key=key):
                keys[value.name] = key
                values[value.name] = inputs.get((role, key))
            case Call():
                _run_call(node, values, uniform)
            case Update(rule="copy", target=target, source=source):
                result.buffers[keys[target.name]] = values[source.name]
            case Update(target=target, source=source):
                result.gradients[keys[target.name]] = values[source.name]
            case Output(value=ref, key=key):
                result.outputs[key] = values[ref.name]
    return result


def model_inputs(model: torch.nn.Module, captured: Any, batch: Any) -> dict[Key, torch.Tensor]:
    """The inputs of a captured step: the model's own tensors, the batch, the constants."""
    inputs: dict[Key, torch.Tensor] = {}
    inputs.update({("parameter", k): p.detach().clone() for k, p in model.named_parameters()})
    inputs.update({("buffer", k): b.detach().clone() for k, b in model.named_buffers()})
    inputs.update({("batch", k): x for k, x in captured.batch.flatten_batch(batch).items()})
    inputs.update({("constant", k): x for k, x in captured.constants.items()})
    return inputs


def _run_call(call: Call, values: dict[str, Any], uniform: Callable[..., Any]) -> None:
    args = [_real(arg, values) for arg in call.args]
    kwargs = {key: _real(arg, values) for key, arg in call.kwargs}
    made = _function(call.op, uniform)(*args, **kwargs)
    for value, tensor in zip(
        call.outputs, made if isinstance(made, tuple | list) else [made], strict=True
    ):
        if value is not None:
            assert (tuple(tensor.shape), str(tensor.dtype)) == (
                value.shape,
                f"torch.{value.dtype}",
            ), call
            values[value.name] = tensor


def _function(op: str, uniform: Callable[..., Any]) -> Callable[..., Any]:
    if op == "weft.uniform":
        return uniform
    if op == "weft.hint":
        return lambda x: x
    if op in ("weft.lstm", "weft.lstm_backward"):
        return getattr(check_recurrent, op.removeprefix("weft."))
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _real(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, Token):
        return torch.device(arg.name) if arg.kind == "device" else getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [_real(part, values) for part in arg]
    return arg
