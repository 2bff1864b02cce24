"""Run a logical graph on whole tensors with plain torch, the loop once for each micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weft.ir.logical import Call, Input, LogicalGraph, Output, Ref, Update
from weft.ops.call import Token, map_argument
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.random import uniform
from weft.runtime.torch_ops import torch_op, torch_value

SEED, STEP = 3, 0


@dataclass
class Step:
    """What one step makes: `outputs` by key, and the sources of its `updates` by the key of their target."""

    graph: LogicalGraph
    inputs: Mapping[tuple[str, str], Tensor]
    known: dict[tuple[str, int], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = self.graph.loop
        self.copies = {
            node.target.name: node.source.name
            for node in self.graph.of_kind(Update)
            if node.rule == "copy" and node.source.name in self.loop
        }

    @property
    def outputs(self) -> dict[str, Tensor]:
        return {node.key: self.value(node.value.name, 0) for node in self.graph.of_kind(Output)}

    @property
    def updates(self) -> dict[str, Tensor]:
        last = self.graph.micro_batches - 1
        return {
            self.graph.producers[node.target.name].key: self.value(node.source.name, last)
            for node in self.graph.of_kind(Update)
        }

    def value(self, name: str, micro: int) -> Tensor:
        """The value as micro-batch `micro` sees it."""
        key = (name, micro if name in self.loop else 0)
        if key not in self.known:
            node = self.graph.producers[name]
            if isinstance(node, Input):
                self.known[key] = self._input(node)
            else:
                results = self._call(node, key[1])
                results = results if isinstance(results, tuple | list) else (results,)
                for value, result in zip(node.outputs, results, strict=True):
                    if value is not None:
                        assert tuple(result.shape) == value.shape, (node.op, result.shape, value)
                        assert str(result.dtype) == f"torch.{value.dtype}", (node, result.dtype)
                        self.known[value.name, key[1]] = result
        return self.known[key]

    def _input(self, node: Input) -> Tensor:
        return self.inputs[node.role, node.key].reshape(node.value.shape)

    def _call(self, node: Call, micro: int) -> Any:
        args = node.args
        every = range(self.graph.micro_batches)
        match node.op:
            case "weft.accumulate":
                return self._accumulated(args[0].name, args[1])
            case "weft.pack":
                return torch.cat([self.value(args[0].name, m) for m in every], args[1])
            case "weft.use" if micro and args[0].name in self.copies:
                return self.value(self.copies[args[0].name], micro - 1)
        node = replace(node, call=node.call.at(micro))

        def leaf(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return self.value(arg.name, micro)
            return torch_value(arg) if isinstance(arg, Token) else arg

        mapped = map_argument(leaf, node.args)
        named = {key: map_argument(leaf, arg) for key, arg in node.kwargs}
        if node.op == "weft.uniform":
            return uniform(SEED, STEP, *mapped, **named)
        function = LOCAL_OPS[node.op] if node.op in LOCAL_OPS else torch_op(node.op)
        return function(*mapped, **named)

    def _accumulated(self, name: str, reduction: str) -> Tensor:
        parts = torch.stack([self.value(name, m) for m in range(self.graph.micro_batches)])
        functions: dict[str, Any] = {
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
            "prod": torch.prod,
        }
        functions |= {"or": torch.any, "and": torch.all}
        return functions[reduction](parts, 0)


def run(graph: LogicalGraph, inputs: Mapping[tuple[str, str], Tensor]) -> Step:
    """One step; `inputs` by role and key, leaves of the batch whole."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    return Step(graph, inputs)
