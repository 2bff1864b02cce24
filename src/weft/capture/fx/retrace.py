"""A fast trace for other shapes, accepted only if it has the same ops as the first trace by `make_fx`.

`make_fx` takes most of the seconds in which a step is planned: it wraps every value, asks every op for constants it
could fold, and copies what it notes. A step that was traced once has shown that it needs little of that. So `_Light`
records a later trace: op, operands, result. Its trace is accepted only if it has the ops of the first trace in the same
order, with the same data flow (`Skeleton`); sizes, strides and numbers may be new. Otherwise, also on an error,
`make_fx` traces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias, final

import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.traceback
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

# Under which `meta` of a graph's module there is what tells the node that made a tensor.
MAKER = "weft.maker"
# For each node in order: its kind, its op, and the numbers of the nodes that it reads.
Skeleton: TypeAlias = tuple[tuple[str, Any, tuple[int, ...]], ...]
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Tags of ops whose result is a number of Python, or which change what a tensor is and not its values.
_NOT_LIGHT = (torch.Tag.data_dependent_output, torch.Tag.inplace_view)
_KEPT_COMPOSITE = (_aten.size.default, _aten.stride.default, _aten.storage_offset.default)


def skeleton(graph: torch.fx.Graph) -> Skeleton:
    """The facts that must be equal for a graph of other shapes to be believed."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    return tuple(
        (
            node.op,
            _kind(node.target) if node.op == "call_function" else None,
            tuple(map(numbers.__getitem__, node.all_input_nodes)),
        )
        for node in numbers
    )


def retrace(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    table: Mapping[Any, Callable[..., Any]],
    like: Skeleton | None,
) -> torch.fx.GraphModule | None:
    """The graph of `make_fx(function, table)(*inputs)`, recorded lightly; None when it is not like the first trace.

    Args:
        function: to run; `make_fx` runs it again when this returns None.
        inputs: nests of fake tensors.
        table: decompositions.
        like: the trace of `make_fx` for other shapes; None for no comparison, and to allow
            outside tensors without data.
    """
    light = _Light(table, like is None)
    try:
        with _as_traced(), light:
            result = function(*light.take(inputs))
        light.end(result)
    except Exception:
        return None
    if like is not None and skeleton(light.graph) != like:
        return None
    module = _LazyGraphModule(light.root, light.graph)
    module.meta[MAKER] = light.maker()
    return module


@contextmanager
def _as_traced() -> Iterator[None]:
    """Set the state that `make_fx` sets and a step could see: the flag of a trace, and no cache of autocast."""
    flag, cached = symbolic_trace._is_fx_tracing_flag, torch.is_autocast_cache_enabled()
    symbolic_trace._is_fx_tracing_flag = True
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        symbolic_trace._is_fx_tracing_flag = flag
        torch.set_autocast_cache_enabled(cached)


@final
class _NotLight(Exception):
    """An op that needs what `make_fx` knows."""


@final
class _Light(TorchDispatchMode):
    """Records the ops that run below autograd within the context, after their decompositions.

    Attributes:
        graph: of them.
        root: holds the tensors of elsewhere that it reads.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]], kept: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Whether tensors without data may come from elsewhere.
        self._kept = kept
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self._table = table
        # By the id of a tensor, which is kept so that no other one gets it.
        self._nodes: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
        self._fresh = WeakTensorKeyDictionary()
        self._outside: dict[int, str] = {}

    def take(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs, which have placeholders now."""
        for number, tensor in enumerate(tree_flatten(inputs)[0]):
            node = self.graph.placeholder(f"arg{number}_1")
            node.meta["val"] = tensor
            self._nodes[id(tensor)] = node, tensor
        return inputs

    def end(self, result: Any) -> None:
        """The function has returned a list of tensors."""
        self.graph.output(self._operand(result))

    def maker(self) -> Callable[[torch.Tensor], torch.fx.Node | None]:
        """Gives the node that made a tensor which is still there; it keeps none of them alive."""
        nodes, fresh = {key: node for key, (node, _) in self._nodes.items()}, self._fresh
        return lambda tensor: nodes.get(id(tensor)) or fresh.get(tensor)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Backward formulas of C++ say None where `make_fx` finds nothing, which is the same.
        kwargs = {key: value for key, value in (kwargs or {}).items() if value is not None}
        if func is _DEVICE:
            (asked,) = args
            return asked.fake_device if isinstance(asked, FakeTensor) else func(asked)
        decomposed = self._decomposed(func, args, kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if _is_special(func):
            raise _NotLight
        # A tensor that was just made of numbers may be written: the graph does so to a copy of it.
        func = _aten.lift_fresh_copy.default if func is _aten.lift_fresh.default else func
        operands = self._operand(args), {key: self._operand(x) for key, x in kwargs.items()}
        node = self._node(func, *operands, name=func.overloadpacket.__name__)
        result = func(*args, **kwargs)
        self._made(node, result)
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that is decomposed."""
        rule = self._table.get(func)
        if rule is not None:
            with self:
                result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if _is_composite(func) and autograd_would_have_decomposed(
            func, tree_flatten((args, kwargs))[0]
        ):
            with self:
                return func.decompose(*args, **kwargs)
        return NotImplemented

    def _operand(self, value: Any) -> Any:
        """A node for each tensor in an argument."""
        if isinstance(value, torch.Tensor):
            found = self._nodes.get(id(value))
            if found is not None:
                return found[0]
            fresh: torch.fx.Node | None = self._fresh.get(value)  # type: ignore[no-untyped-call]
            return self._constant(value) if fresh is None else fresh
        if isinstance(value, list | tuple):
            return [*map(self._operand, value)]
        return value

    def _constant(self, tensor: torch.Tensor) -> torch.fx.Node:
        """A tensor of elsewhere."""
        if type(tensor) not in _PLAIN and not (self._kept and isinstance(tensor, FakeTensor)):
            raise _NotLight
        name = self._outside.get(id(tensor))
        if name is None:
            name = self._outside[id(tensor)] = f"_tensor_constant{len(self._outside)}"
            setattr(self.root, name, tensor)
        node = self.graph.get_attr(name)
        node.meta["val"] = tensor
        return node

    def _made(self, node: torch.fx.Node, result: Any) -> None:
        """A node has given a tensor, or several."""
        node.meta["val"] = result
        if isinstance(result, FakeTensor):
            if node.all_input_nodes:
                self._nodes[id(result)] = node, result
            else:
                # A factory op returns its tensor as is only while nobody else holds it.
                node.meta["val"] = result.detach()
                self._fresh[result] = node
        elif isinstance(result, list | tuple):
            for number, part in enumerate(result):
                self._made(self._node(operator.getitem, (node, number), {}), part)
        elif result is not None:
            raise _NotLight

    def _node(self, op: Any, args: Any, kwargs: Any, name: str = "getitem") -> torch.fx.Node:
        """Noted as `make_fx` does it (`weft.capture.fx.private.note`, `sequence_of`)."""
        node = self.graph.create_node("call_function", op, tuple(args), kwargs, name)
        notes = torch.fx.traceback.current_meta.get("custom")
        if notes is not None:
            node.meta["custom"] = dict(notes)
        node.meta["seq_nr"] = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        return node


@cache
def _kind(func: Any) -> Any:
    """An op, or what views have in common: a slice of all rows is recorded as an alias, of fewer as a slice."""
    if not isinstance(func, OpOverload) or func._schema.is_mutable:
        return func
    return "view" if any(result.alias_info for result in func._schema.returns) else func


@cache
def _is_special(func: Any) -> bool:
    """True if `make_fx` does more with an op than to record it."""
    if not isinstance(func, OpOverload):
        return True
    moves = func._schema.name in ("aten::set_", "aten::resize_", "aten::is_nonzero")
    return moves or any(tag in func.tags for tag in _NOT_LIGHT)


@cache
def _is_composite(func: Any) -> bool:
    """True if an op may be made of others, which autograd would have seen in its place."""
    return isinstance(func, OpOverload) and func not in _KEPT_COMPOSITE and func._can_decompose()
