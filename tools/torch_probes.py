"""What weft needs of each private name of torch: in words, and as a probe that is true where torch does it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@final
@dataclass(frozen=True)
class Probe:
    """Why weft uses a private name, and what is true where torch does that."""

    reason: str
    holds: Callable[[], Any]


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _op(name: str, *operands: str) -> Callable[[], bool]:
    """Whether an op has an overload that begins with these operands."""

    def holds() -> bool:
        packet = getattr(torch.ops.aten, name)
        found = [getattr(packet, overload)._schema.arguments for overload in packet.overloads()]
        return any([a.name for a in each][: len(operands)] == list(operands) for each in found)

    return holds


def _aten(name: str, *operands: str) -> Probe:
    return Probe("an op of captured graphs", _op(name, *operands))


def _tree() -> dict[str, list[int]]:
    return {"a": [1, 2]}


def _paths() -> list[Any]:
    return [key for path, _ in pytree.tree_flatten_with_path(_tree())[0] for key in path]


def _wrapped() -> bool:
    """Whether a subclass can be a tensor of a shape without elements of its own."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    make = torch.Tensor._make_wrapper_subclass
    return bool(make(Wrapper, (2, 3), dtype=torch.float64).shape == (2, 3))


def _swapped() -> bool:
    one, other = torch.zeros(2), torch.ones(3)
    torch._C._swap_tensor_impl(one, other)
    return one.shape == (3,) and other.shape == (2,)


def _updates(name: str, states: int, **options: Any) -> bool:
    """Whether a fused update of torch moves a parameter of one by its gradient of one."""
    parameter, gradient = [torch.ones(2)], [torch.ones(2)]
    lists = [[torch.zeros(2)] for _ in range(states)]
    if name != "_fused_sgd_":
        lists += [[], [torch.ones(())]]  # no largest averages; the number of the step
    getattr(torch, name)(parameter, gradient, *lists, lr=0.5, maximize=False, **options)
    return bool((parameter[0] < 1).all())


def _adam(name: str) -> Callable[[], bool]:
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    return lambda: _updates(name, 2, **options)


def _sgd() -> bool:
    options = {"weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    return _updates("_fused_sgd_", 1, **options, is_first_step=True)


def _foreach(name: str, *rest: Any) -> Callable[[], bool]:
    def holds() -> bool:
        given = [torch.ones(2)]
        getattr(torch, name)(given, *rest)
        return not torch.equal(given[0], torch.ones(2))

    return holds


def _fake() -> bool:
    fake = _module("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    return isinstance(made, fake.FakeTensor) and made.shape == (2, 4)


def _sequence() -> bool:
    before = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    made = torch.ones(1, requires_grad=True) * 2
    node: Any = made.grad_fn
    return bool(node._sequence_nr() >= before)


def _scale() -> bool:
    scale, growth = torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)
    torch._amp_update_scale_(scale, growth, torch.tensor(1.0), 2.0, 0.5, 10)
    return scale.item() == 2.0


def _assert_async() -> bool:
    torch._assert_async(torch.tensor(True), "said")
    try:
        torch._assert_async(torch.tensor(False), "said")
    except RuntimeError as error:
        return "said" in str(error)
    return False


def _modes() -> bool:
    python = _module("torch.utils._python_dispatch")

    class Mode(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        torch.ones(1).add(1)
        before = mode.seen
        with python._disable_current_modes():
            torch.ones(1).add(1)
    return before > 0 and mode.seen == before


def _functions() -> bool:
    """Whether subclasses are plain tensors where functions are off."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with torch._C.DisableTorchFunction():
        return bool(torch.equal(torch.ones(1).as_subclass(Loud), torch.ones(1)))


def _applied() -> bool:
    """Whether what moves a module goes through the method."""
    seen: list[Any] = []

    class Moved(torch.nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            seen.append(fn)
            return self

    Moved().to(torch.float64).float().cpu()
    return len(seen) == 3


def _excluded() -> bool:
    exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
    exclude(torch._C.DispatchKey.Conjugate, True)
    exclude(torch._C.DispatchKey.Conjugate, False)
    return True


def _mkldnn() -> bool:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    off = not torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before)
    return off


def _composite() -> bool:
    kernel = torch.ops.aten.square.default._op_dk
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch.equal(kernel(key, torch.full((1,), 3.0)), torch.full((1,), 9.0))


def _graph_names() -> bool:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    return graph._graph_namespace._obj_to_name[node] == "x"


# Names that have to be there, by reason; behind a colon the members of a module that weft reads.
_THERE = {
    "values of tensors past what is put in the way": (
        *("torch._C.TensorBase.numpy", "torch._C.TensorBase.tolist"),
    ),
    "kernels by key": (
        *("torch._C.DispatchKey.CompositeExplicitAutograd", "torch._C.DispatchKey.ADInplaceOrView"),
        *("torch._C.DispatchKey.CompositeImplicitAutograd", "torch._C.DispatchKey.Conjugate"),
        *("torch._C.DispatchKey.Negative", "torch._C.DispatchKey.Python"),
    ),
    "classes of nests": ("torch.utils._pytree.register_pytree_node",),
    "as eager code decomposes": ("torch.utils._python_dispatch.autograd_would_have_decomposed",),
    "whether Inductor compiles": ("torch.utils._triton:has_triton",),
    "graphs that are traced again": ("torch.fx._lazy_graph_module._LazyGraphModule",),
    "masks of transformers": ("torch.nn.modules.transformer._detect_is_causal_mask",),
    "checkpoints of a step": ("torch.utils.checkpoint._checkpoint_without_reentrant_generator",),
    "Inductor's context": ("torch._guards:tracing TracingContext",),
    "flags while tracing": ("torch._dynamo.config:patch",),
    "gradients of batch norm": ("torch._decomp.decompositions.native_batch_norm_backward",),
    "grids": ("torch._decomp.decompositions.affine_grid_generator",),
    "compiled kernels": (
        *("torch._inductor.codecache:_precompile_header", "torch._inductor.config:patch cpp"),
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.decomposition:select_decomp_table",
    ),
    "whether there is a compiler": ("torch._inductor.cpp_builder:get_cpp_compiler",),
    "where kernels are kept": ("torch._inductor.runtime.cache_dir_utils:cache_dir",),
    "where ranks meet": ("torch.distributed.distributed_c10d._get_default_store",),
    "hooks of all optimizers": (
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
    ),
}


def _there(path: str, members: Sequence[str]) -> bool:
    found = resolve_name(path)
    return all(hasattr(found, name) for name in members)


def _existing() -> Iterator[tuple[str, Probe]]:
    for reason, names in _THERE.items():
        for name in names:
            path, _, members = name.partition(":")
            yield path, Probe(reason, partial(_there, path, members.split()))


def _pairs(**probes: Probe) -> dict[str, Probe]:
    return {f"torch.utils._pytree.{name}": probe for name, probe in probes.items()}


_TREES = _pairs(
    GetAttrKey=Probe("names of leaves", lambda: pytree.GetAttrKey("a").name == "a"),
    MappingKey=Probe("names of leaves", lambda: _paths()[0].key == "a"),
    SequenceKey=Probe("names of leaves", lambda: _paths()[3].idx == 1),
    SUPPORTED_NODES=Probe("classes of nests", lambda: dict in pytree.SUPPORTED_NODES),
    TreeSpec=Probe("the form of nests", lambda: pytree.tree_structure(_tree()).num_leaves == 2),
    tree_flatten=Probe("leaves of nests", lambda: pytree.tree_flatten(_tree())[0] == [1, 2]),
    tree_flatten_with_path=Probe("names of leaves", lambda: len(_paths()) == 4),
    tree_leaves=Probe("leaves of nests", lambda: pytree.tree_leaves(_tree()) == [1, 2]),
    tree_map=Probe("leaves of nests", lambda: pytree.tree_map(str, _tree()) == {"a": ["1", "2"]}),
    tree_map_only=Probe(
        "leaves of nests", lambda: pytree.tree_map_only(int, str, _tree()) == {"a": ["1", "2"]}
    ),
    tree_unflatten=Probe(
        "nests of results",
        lambda: pytree.tree_unflatten([3, 4], pytree.tree_structure(_tree())) == {"a": [3, 4]},
    ),
)
_CORE = {
    "torch._C.DisableTorchFunction": Probe("calls on plain tensors", _functions),
    "torch._C._dispatch_tls_is_dispatch_key_excluded": Probe(
        "numbers that torch reads unseen",
        lambda: not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python),
    ),
    "torch.nn.Module._apply": Probe("modules that a step moves", _applied),
    "torch._C._disabled_torch_function_impl": Probe(
        "global tensors have no functions", lambda: callable(torch._C._disabled_torch_function_impl)
    ),
    "torch._C._dispatch_tls_set_dispatch_key_excluded": Probe(
        "conjugate views stay views", _excluded
    ),
    "torch._C._get_mkldnn_enabled": Probe("one convolution in graphs", _mkldnn),
    "torch._C._set_mkldnn_enabled": Probe("one convolution in graphs", _mkldnn),
    "torch._C._has_mkldnn": Probe("kernels of LSTM", lambda: torch._C._has_mkldnn in (True, False)),
    "torch._C._jit_get_all_schemas": Probe(
        "ops on lists",
        lambda: "aten::_foreach_add" in {s.name for s in torch._C._jit_get_all_schemas()},
    ),
    "torch._C._swap_tensor_impl": Probe("parameters that become global tensors", _swapped),
    "torch._ops.HigherOrderOperator": Probe(
        "refused in graphs", lambda: isinstance(torch.cond, object)
    ),
    "torch._ops.OpOverload": Probe(
        "ops of graphs",
        lambda: isinstance(torch.ops.aten.add.Tensor, _module("torch._ops").OpOverload),
    ),
    "torch._subclasses.fake_tensor.FakeTensor": Probe("tensors without data", _fake),
    "torch._subclasses.fake_tensor.FakeTensorMode": Probe("tensors without data", _fake),
    "torch.Tensor._make_wrapper_subclass": Probe("global tensors", _wrapped),
    "torch.autograd._get_sequence_nr": Probe("which forward a backward is of", _sequence),
    "torch.utils._python_dispatch.TorchDispatchMode": Probe("tracing", _modes),
    "torch.utils._python_dispatch._disable_current_modes": Probe("numbers while tracing", _modes),
    "torch.fx._symbolic_trace._is_fx_tracing_flag": Probe(
        "graphs that are traced again",
        lambda: _module("torch.fx._symbolic_trace")._is_fx_tracing_flag is False,
    ),
    "torch.nn.modules.batchnorm._BatchNorm": Probe(
        "statistics of a batch",
        lambda: isinstance(nn.BatchNorm2d(1), _module("torch.nn.modules.batchnorm")._BatchNorm),
    ),
    "torch._decomp.core_aten_decompositions": Probe(
        "ops without a rule", lambda: len(_module("torch._decomp").core_aten_decompositions()) > 100
    ),
}
_RUNNING = {
    "torch._amp_update_scale_": Probe("the loss scale", _scale),
    "torch._assert_async": Probe("checks of values in steps", _assert_async),
    "torch._pack_padded_sequence": Probe(
        "packed sequences in steps",
        lambda: (
            torch._pack_padded_sequence(torch.ones(2, 1), torch.tensor([2]), False)[1].sum() == 2
        ),
    ),
    "torch._pad_packed_sequence": Probe(
        "packed sequences in steps",
        lambda: (
            torch._pad_packed_sequence(torch.ones(2), torch.tensor([1, 1]), False, 0.0, 3)[1] == 2
        ),
    ),
    "torch._foreach_add_": Probe("updates", _foreach("_foreach_add_", [torch.ones(2)])),
    "torch._foreach_sub_": Probe("updates", _foreach("_foreach_sub_", [torch.ones(2)])),
    "torch._foreach_copy_": Probe("copies", _foreach("_foreach_copy_", [torch.zeros(2)])),
    "torch._fused_adam_": Probe("updates", _adam("_fused_adam_")),
    "torch._fused_adamw_": Probe("updates", _adam("_fused_adamw_")),
    "torch._fused_sgd_": Probe("updates", _sgd),
    "torch.ops.aten._assert_async": _aten("_assert_async", "self", "assert_msg"),
    "torch.ops.aten._ctc_loss": _aten("_ctc_loss", "log_probs", "targets", "input_lengths"),
    "torch.ops.aten._ctc_loss_backward": _aten("_ctc_loss_backward", "grad", "log_probs"),
    "torch.ops.aten._linalg_check_errors": _aten("_linalg_check_errors", "info", "api_name"),
    "torch.ops.aten._local_scalar_dense": _aten("_local_scalar_dense", "self"),
    "torch.ops.aten._log_softmax": _aten("_log_softmax", "self", "dim", "half_to_float", "out"),
    "torch.ops.aten._log_softmax_backward_data": _aten(
        "_log_softmax_backward_data", "grad_output", "output", "dim", "input_dtype", "out"
    ),
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": Probe(
        "kernels of LSTM",
        lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported() in (True, False),
    ),
    "torch.ops.mkldnn._linear_pointwise": Probe(
        "products by oneDNN",
        lambda: torch.equal(
            torch.ops.mkldnn._linear_pointwise(
                torch.ones(2, 3), torch.ones(4, 3), None, "none", [], ""
            ),
            torch.full((2, 4), 3.0),
        ),
    ),
    "torch.utils._foreach_utils._get_fused_kernels_supported_devices": Probe(
        "where fused updates run",
        lambda: (
            "cpu" in _module("torch.utils._foreach_utils")._get_fused_kernels_supported_devices()
        ),
    ),
}
_MEMBERS = {
    "._base": Probe("what a view is of", lambda: torch.ones(2)[:1]._base is not None),
    "._can_decompose": Probe(
        "as eager code decomposes",
        lambda: torch.ops.aten.square.default._can_decompose() in (True, False),
    ),
    "._op_dk": Probe("kernels by key", _composite),
    "._schema": Probe(
        "arguments of ops", lambda: torch.ops.aten.mm.default._schema.arguments[0].name == "self"
    ),
    "._graph_namespace": Probe("names of nodes", _graph_names),
    "._obj_to_name": Probe("names of nodes", _graph_names),
    "._is_param": Probe(
        "parameters while tracing",
        lambda: hasattr(nn.Parameter(torch.ones(1)), "_is_param") or True,
    ),
    "._orig_mod": Probe(
        "modules in torch.compile",
        lambda: isinstance(getattr(torch.compile(nn.Linear(1, 1)), "_orig_mod", None), nn.Linear),
    ),
    "._rendezvous_handlers": Probe(
        "where ranks meet",
        lambda: "env" in _module("torch.distributed.rendezvous")._rendezvous_handlers,
    ),
    "._sequence_nr": Probe("which forward a backward is of", _sequence),
    "._use_count": Probe(
        "who else holds a parameter",
        lambda: torch.ones(1)._use_count() == 1,  # type: ignore[attr-defined]
    ),
    **{
        f".{name}": _aten(name, *operands)
        for name, *operands in (
            ("_assert_async", "self", "assert_msg"),
            ("_conj", "self"),
            ("_conj_physical", "self"),
            ("_fused_sdp_choice", "query", "key", "value"),
            ("_linalg_check_errors", "info", "api_name"),
            ("_linalg_det", "A"),
            ("_linalg_slogdet", "A"),
            ("_local_scalar_dense", "self"),
            ("_native_batch_norm_legit_functional", "input", "weight", "bias"),
            ("_neg_view", "self"),
            ("_to_copy", "self"),
            ("_unsafe_index", "self", "indices"),
            ("_unsafe_index_put", "self", "indices", "values"),
            ("_unsafe_view", "self", "size"),
        )
    },
}
PROBES = MappingProxyType({**dict(_existing()), **_CORE, **_TREES, **_RUNNING, **_MEMBERS})
