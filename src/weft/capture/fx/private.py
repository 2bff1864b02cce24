"""Every private or unstable torch API that tracing needs, after a few plain functions.

- `make_fx` with `_allow_non_fake_inputs`: the trace below autograd.
- `FakeTensorMode`: tensors without data.
- `torch.fx.traceback.preserve_node_meta` and `current_meta`: notes on nodes
  (`node.meta["custom"]`), and `node.meta["seq_nr"]`, the number of the autograd node that a forward
  op made.
- `Node._sequence_nr` of autograd's nodes: the same number, seen from the backward;
  `torch.autograd._get_sequence_nr`: the next one.
- `get_proxy_mode`, `get_proxy_slot` and the proxy's `constant`; `FakeTensor.constant`: values that a
  trace knows, and the node that made a tensor; `FakeTensor.fake_mode`: which tensors are of a trace.
- `TorchDispatchMode`: sees every op below autograd.
- `torch._C._set_mkldnn_enabled`: the same trace whatever kernels the machine has.

`tests/capture/fx/test_private.py` tests each of these.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar, final

import torch
import torch.fx.traceback
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.capture.fx.retrace import MAKER, Skeleton, retrace

FakeMode: TypeAlias = FakeTensorMode
# Ops that are decomposed while a step is traced, and the functions that do it.
Decompositions: TypeAlias = Mapping[torch._ops.OpOverload, Callable[..., Any]]

Function = TypeVar("Function", bound=Callable[..., Any])


def shapes_of(op: str) -> Callable[[Function], Function]:
    """Let the decorated function give the results of an op of weft's ("weft::lstm") on tensors without data."""
    register: Callable[[Function], Function] = torch.library.register_fake(op)
    return register


def stands_for(table: dict[Any, Callable[..., Any]], *ops: Any) -> Callable[[Function], Function]:
    """Put the decorated function into `table` in place of others.

    Args:
        ops: functions of torch, and names of ATen ops ("mean.default"), of which this torch may lack some.
    """

    def note(function: Function) -> Function:
        for op in ops:
            if isinstance(op, str):
                packet, overload = op.split(".")
                op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if op is not None:
                table[op] = function
        return function

    return note


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, `__torch_dispatch__` runs in place of every op below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


# Where fake tensors log errors with a whole stack, though they raise them as well.
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")
# The note on backward nodes: the sequence number of the autograd node that ran.
_SEQUENCE = "weft.sequence"
# The note on copies that stand for views.
_COPY = "weft.copy"


def fake_mode() -> FakeMode:
    """A mode in which tensors have shapes but no data; real tensors that enter become fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(
    mode: FakeMode, like: torch.Tensor, device: str, requires_grad: bool = False
) -> torch.Tensor:
    """A contiguous tensor without data of the shape and dtype of `like`."""
    with mode:
        return torch.empty(like.shape, dtype=like.dtype, device=device, requires_grad=requires_grad)


def values_made() -> AbstractContextManager[Any]:
    """Within the context, ops run on data whatever modes are on."""
    return _disable_current_modes()


def is_fake(value: Any) -> bool:
    """True if a value is a tensor without data."""
    return isinstance(value, FakeTensor)


def living_fakes(mode: FakeMode) -> list[torch.Tensor]:
    """The tensors without data of a mode that somebody holds, also in cycles that are not collected yet."""
    return [
        each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode
    ]


def forget_values(graph: torch.fx.Graph) -> None:
    """Take the tensors without data, and all else that was noted, off every node that a graph has or has had."""
    named = graph._graph_namespace._obj_to_name  # nodes that were erased have their names still
    for each in (*graph.nodes, *named):
        if isinstance(each, torch.fx.Node):
            each.meta.clear()


def maker_in(module: torch.fx.GraphModule, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that made a tensor without data, of what `trace` or `trace_like` gave; None when it was none."""
    found: torch.fx.Node | None = module.meta[MAKER](tensor)
    return found


def is_known(tensor: torch.Tensor) -> bool:
    """True if a trace knows the values of a tensor: it is from outside, or made of numbers of Python."""
    if not is_fake(tensor):
        return True
    mode = get_proxy_mode()
    if mode is None:  # a light trace, which leaves what has a value to `make_fx`
        return tensor.constant is not None  # type: ignore[attr-defined]
    return get_proxy_slot(tensor, mode.tracer, None, lambda x: x.constant) is not None


def trace(
    function: Callable[[Any], Any],
    inputs: Any,
    mode: FakeMode,
    table: Decompositions,
    read: Callable[[torch.Tensor, str], None] = lambda tensor, op: None,
) -> torch.fx.GraphModule:
    """Run `function(inputs)` on fake tensors and record every ATen op below autograd.

    `read` is called for an op that gives Python a value of an outside tensor, directly or through Python numbers.
    """
    tracers: list[Any] = []

    def noting_tracer(given: Any) -> Any:
        tracers.append(get_proxy_mode().tracer)  # type: ignore[union-attr]
        return function(given)

    tracer = make_fx(
        noting_tracer,
        decomposition_table=dict(table),
        tracing_mode="real",
        _allow_non_fake_inputs=True,
    )
    meta_kept = torch.fx.traceback.preserve_node_meta()
    with mode, _Outside(read), meta_kept, _own_notes(), _same_everywhere():
        module = tracer(inputs)

    def maker(tensor: torch.Tensor) -> torch.fx.Node | None:
        proxy = get_proxy_slot(tensor, tracers[-1], None, lambda found: found.proxy)
        return None if proxy is None else proxy.node

    module.meta[MAKER] = maker
    return module


def trace_like(
    like: Skeleton | None,
    function: Callable[[Any], Any],
    inputs: Any,
    mode: FakeMode,
    table: Decompositions,
) -> torch.fx.GraphModule | None:
    """The graph of `trace`, in a third of its time, if it is like a trace for other shapes; else None.

    `like` is None if the graph is only compared with another light trace.
    It refuses nothing, because the other trace did.
    """
    meta_kept = torch.fx.traceback.preserve_node_meta()
    with mode, meta_kept, _own_notes(), _same_everywhere():
        return retrace(function, (inputs,), table, like)


def functional(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    mode: FakeMode,
    table: Decompositions,
    like: Skeleton | None = None,
) -> torch.fx.GraphModule:
    """The same graph without writes in place; an input that was written gets one `copy_` at the end.

    `module` must hold no constants; notes on its nodes reach the nodes made from them. A graph that neither writes
    nor holds ops of the `table` comes back as it is. Pass the result found for other shapes if there is one, as in
    `trace_like`.
    """
    # Views do not look different in a functional trace, where nothing is written.
    targets = [node.target for node in module.graph.nodes]
    ops = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    higher = any(isinstance(target, torch._ops.HigherOrderOperator) for target in targets)
    if not higher and not any(op in table or op._schema.is_mutable for op in ops):
        return module

    def run(*values: torch.Tensor) -> Any:
        return _Functional(module).run(*values)

    function = torch.func.functionalize(run, remove="mutations")
    tracer = make_fx(function, decomposition_table=dict(table), tracing_mode="real")
    with mode, torch.fx.traceback.preserve_node_meta(), torch.no_grad():
        found = retrace(function, tuple(inputs), table, like) if like else None
        found = found or tracer(*inputs)
    for node in found.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if "val" not in node.meta:  # it did not fit, and was done without
            found.graph.erase_node(node)
    return found


@final
class _Functional(torch.fx.Interpreter):
    """Runs a graph of which writes become values.

    Such a value, and values computed from it, may have other strides than the written tensor;
    a view that no longer fits becomes a copy, if nothing writes to either later.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            return super().run_node(n)
        except RuntimeError as error:
            if _BANNED_VIEW in str(error):
                raise UnwritableView(n) from None
            raise

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, ValueError):
            # The node that runs, where it is a view by shape.
            views: Any = self.graph.nodes if target is torch.ops.aten.view.default else ()
            made = [node for node in views if node.target is target]
            at = next((node for node in made if self.env.get(node.args[0]) is args[0]), None)
            if at is None or _written_after(self.graph, at):
                raise
            return torch.ops.aten.reshape.default(*args)


def copy_noted() -> AbstractContextManager[None]:
    """Within the context, nodes are recorded as copies that stand for views."""
    return note(**{_COPY: True})


def noted_copies(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that are copies in place of views."""
    return [node for node in graph.nodes if notes_of(node).get(_COPY)]


def written_copy(graph: torch.fx.Graph, copy: torch.fx.Node) -> bool:
    """True if a copy in place of a view would not do: it, or what it was made of, is written after it."""
    roots = copy, root_of(copy.args[0])  # type: ignore[arg-type]
    return any(_written_after(graph, copy, root) for root in roots)


def _written_after(
    graph: torch.fx.Graph, view: torch.fx.Node, of: torch.fx.Node | None = None
) -> bool:
    """True if anything after a node writes to the tensor that it looks at, or to another one."""
    nodes = list(graph.nodes)
    root = root_of(view) if of is None else of
    return any(root in written_in(node) for node in nodes[nodes.index(view) + 1 :])


def written_in(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that made the tensors to which a node writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written = written_by(node.target, node.args, node.kwargs)
    return [root_of(one) for one in written if isinstance(one, torch.fx.Node)]


def root_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory a node looks at, behind views and writes in place."""
    while isinstance(node.target, torch._ops.OpOverload):
        aliases = any(result.alias_info for result in node.target._schema.returns)
        if not aliases or not isinstance(node.args[0], torch.fx.Node):
            break
        node = node.args[0]
    return node


@final
class Refusal(Exception):
    """The step does what a graph cannot hold; the message is the reason, without the place."""


# Torch's message on a write through a view of an `as_strided` view.
_BANNED_VIEW = "encountered a mutation on a view chain"


@final
class UnwritableView(Exception):
    """A write through a view that cannot become a value; `node` is the write."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(_BANNED_VIEW)
        self.node = node


@final
class _Outside(DispatchMode):  # type: ignore[no-untyped-call]
    """Stops an op before it writes a real tensor, which would be the user's data, and notes those that read one."""

    def __init__(self, read: Callable[[torch.Tensor, str], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(map(_is_real, written_by(func, args, kwargs))):
            raise Refusal(
                f"{func} writes a tensor that is neither a registered buffer nor made by the step: "
                "register it with register_buffer, or compute a new one"
            )
        result = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            for x in args:
                for source in _made_of(x) if isinstance(x, torch.Tensor) else ():
                    self._read(source, str(func))
        return result


def _made_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors from outside of which the values of one that is known come; numbers of Python are none of them."""
    if _is_real(tensor):
        return [tensor]
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    waiting, found = [get_proxy_slot(tensor, tracer).proxy.node], []
    while waiting:
        node = waiting.pop()
        waiting += node.all_input_nodes
        if node.op == "get_attr":
            held = getattr(tracer.root, str(node.target))
            lifted = any(
                user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users
            )
            # For numbers, if it is no memory of elsewhere, such as an array's.
            found += [] if lifted and held.untyped_storage().resizable() else [held]
    return found


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of an op writes in place."""
    written = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [x for part in written for x in (part if isinstance(part, list | tuple) else [part])]


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)


@final
class _Noted:
    """Adds notes to the ones that nodes are recorded with.

    Not a generator as torch's `annotate` is: where a step raises between a hook and its
    counterpart, a generator would restore its old notes whenever it is collected, in the middle of
    another trace.
    """

    def __init__(self, notes: Mapping[str, Any]) -> None:
        self._notes = notes
        self._before: Mapping[str, Any] = {}

    def __enter__(self) -> None:
        meta = torch.fx.traceback.current_meta
        self._before = meta.get("custom", {})
        meta["custom"] = {**self._before, **self._notes}

    def __exit__(self, *_: object) -> None:
        torch.fx.traceback.current_meta["custom"] = dict(self._before)


def note(**notes: Any) -> AbstractContextManager[None]:
    """Within the context, nodes are recorded with these notes; see `notes_of`."""
    return _Noted(notes)


@contextmanager
def _own_notes() -> Iterator[None]:
    """Notes begin empty, and none is left afterwards, also not by a step that raises."""
    meta = torch.fx.traceback.current_meta
    before = meta.pop("custom", None)
    try:
        yield
    finally:
        meta.pop("custom", None)
        if before is not None:
            meta["custom"] = before


def notes_now() -> Mapping[str, Any]:
    """The notes that nodes are recorded with."""
    notes: Mapping[str, Any] = torch.fx.traceback.current_meta.get("custom", {})
    return notes


def notes_of(node: torch.fx.Node) -> Mapping[str, Any]:
    """The notes on a node."""
    notes: Mapping[str, Any] = node.meta.get("custom", {})
    return notes


def set_notes(node: torch.fx.Node, notes: Mapping[str, Any]) -> None:
    """Replace the notes on a node."""
    node.meta["custom"] = dict(notes)


def sequence_of(node: torch.fx.Node) -> int | None:
    """Number of the autograd node that a forward op made; the same number as on the backward ops it causes."""
    return node.meta.get("seq_nr")


def backward_sequence_of(node: torch.fx.Node) -> int | None:
    """Number of the autograd node in whose backward this op ran; None outside of one."""
    return notes_of(node).get(_SEQUENCE)


def running_sequence() -> int | None:
    """Number of the autograd node whose backward runs, or has raised."""
    return notes_now().get(_SEQUENCE)


def nodes_so_far() -> int:
    """The number that the next autograd node gets."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def mark_backward(loss: torch.Tensor) -> list[torch.Tensor]:
    """Let every backward op below `loss` be recorded with the number of its autograd node.

    Returns:
        The leaves that `loss.backward()` gives gradients.
    """
    leaves: list[torch.Tensor] = []
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        _mark(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves


def _mark(node: Any) -> None:
    noted = _Noted({_SEQUENCE: node._sequence_nr()})

    def enter(*_: Any) -> None:
        noted.__enter__()

    def leave(*_: Any) -> None:
        noted.__exit__()

    node.register_prehook(enter)
    node.register_hook(leave)


@contextmanager
def _same_everywhere() -> Iterator[None]:
    """No kernels of one machine (oneDNN and cuDNN fuse whole LSTMs), no threads of autograd, no log."""
    mkldnn, level = torch._C._get_mkldnn_enabled(), _fake_log.level
    torch._C._set_mkldnn_enabled(False)
    _fake_log.setLevel(logging.CRITICAL)
    try:
        with (
            torch.backends.cudnn.flags(enabled=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        torch._C._set_mkldnn_enabled(mkldnn)
        _fake_log.setLevel(level)
