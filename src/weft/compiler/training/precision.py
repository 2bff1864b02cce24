"""In which dtypes a step computes, exchanges, adds up and updates, as a strategy says it.

In which dtype the gradients of a step are added up over its micro-batches.

Before: the whole-batch graph, in which an optimizer reads a gradient. After: a gradient of half
precision goes through float32 on its way there, and with it the place where the split in time adds
up, as sums do not pass a conversion that loses something:

    %w.wide = aten._to_copy(%g, float32)
    %w.sum  = aten._to_copy(%w.wide, bfloat16)      not in a part of the sum

Where gradients are to be added up as they are, the conversions between them and the optimizer, in
graphs with float32 parameters or masters, take the whole sum: `weft.cast_whole`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from weft.compiler.training.gradients import gradients, passed_to_gradients, with_sources
from weft.errors import StrategyError
from weft.ir.logical import Call, LogicalGraph, Ref, Value
from weft.ops.call import Token
from weft.ops.dtypes import holds

Half: TypeAlias = Literal["bf16", "fp16"]
Dtype: TypeAlias = Literal["bf16", "fp16", "fp32"]
HALVES: tuple[Half, ...] = get_args(Half)

# The names that PyTorch has for them.
_SPELLINGS: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_NAMES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# What each field takes, beside None.
_TAKES: dict[str, tuple[str, ...]] = {
    "compute": HALVES,
    "parameters": HALVES,
    "reduce": ("bf16", "fp16", "fp32"),
    "accumulate": ("fp32",),
    "activations": ("fp32",),
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. None leaves a dtype as the model's own ops make it.

    Dtypes are "bf16", "fp16" and "fp32", or PyTorch's: "bfloat16", `torch.bfloat16`.

    Attributes:
        compute: the forward runs under autocast: matrix products and convolutions in this dtype.
            With "fp16" the loss is scaled, as `torch.amp.GradScaler` does it.
        parameters: what the forward reads of every floating-point parameter, and of what the model
            is called with, is cast to this dtype; under ZeRO the cast is what travels
            (`param_dtype` of FSDP2's MixedPrecisionPolicy).
        reduce: of gradients on their way between ranks (`reduce_dtype` of FSDP2,
            `grad_reduce_in_fp32` of Megatron); None for the dtype that they have there.
        accumulate: of sums of gradients over micro-batches: "fp32", or None for the gradients' own
            (`accumulate_allreduce_grads_in_fp32` of Megatron).
        masters: optimizers update float32 copies of narrower parameters, which are part of their
            states, and the parameters are these copies, rounded.
        activations: "fp32" adds up in float32 what several ranks have parts of in a narrower
            dtype, such as the outputs of row-split layers; None for their own.
    """

    compute: Half | None = None
    parameters: Half | None = None
    reduce: Dtype | None = None
    accumulate: Literal["fp32"] | None = "fp32"
    masters: bool = False
    activations: Literal["fp32"] | None = None

    def __post_init__(self) -> None:
        for name in _TAKES:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if not isinstance(self.masters, bool):
            raise StrategyError(
                f"weft.Precision(masters=…) takes True or False, found {self.masters!r}"
            )

    def content(self) -> dict[str, Any]:
        """The fields that are set, as plain data."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if value != getattr(Precision, name)}


def precision_of(value: object) -> Precision | None:
    """The precision that a strategy gives: an object, the dtype to compute in, or None.

    Raises:
        StrategyError: when it is anything else.
    """
    if value is None or isinstance(value, Precision):
        return value
    compute = _spelled(value)
    if compute not in HALVES:
        raise StrategyError(
            f"precision= takes one of {', '.join(map(repr, HALVES))}, a weft.Precision(…), or None, "
            f"found {value!r}"
        )
    return Precision(compute)


def short_form(value: object) -> object:
    """A dtype to compute in as "bf16" or "fp16", everything else as it is."""
    if value is None or isinstance(value, Precision):
        return value
    found = precision_of(value)
    return found and found.compute


def dtype_of(name: Dtype) -> str:
    """PyTorch's name: "bfloat16" of "bf16"."""
    return _NAMES[name]


def _checked(name: str, value: object) -> object:
    found = _spelled(value)
    if found is not None and found not in _TAKES[name]:
        known = ", ".join(map(repr, _TAKES[name]))
        raise StrategyError(f"weft.Precision({name}=…) takes {known} or None, found {value!r}")
    return found


def _spelled(value: object) -> object:
    """A dtype by weft's name, where it is PyTorch's own or one of its names."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    return _SPELLINGS.get(text, value)


CAST = "aten._to_copy.default"
CASTS = frozenset((CAST, "prims.convert_element_type.default", "weft.cast_whole"))
HALF = ("bfloat16", "float16")


def lay_sums(graph: LogicalGraph, precision: Precision | None, micro_batches: int) -> LogicalGraph:
    """The graph whose gradients are added up in float32, or as they are."""
    if micro_batches == 1:
        return graph
    if (precision or Precision()).accumulate is None:
        return _as_they_are(graph)
    return _in_float32(graph)


def cast_call(source: Value, dtype: str, name: str, like: Call, op: str = CAST) -> Call:
    """A conversion of a value, run where `like` is."""
    made = replace(source, name=name, dtype=dtype)
    if op == CAST:
        args, kwargs = (Ref(source.name),), (("dtype", Token("dtype", dtype)),)
        return Call(op, args, kwargs, (made,), like.location, like.phase)
    every = (Ref(source.name), Token("dtype", dtype))
    return Call(op, every, (), (made,), like.location, like.phase)


def _in_float32(graph: LogicalGraph) -> LogicalGraph:
    calls: list[Call] = []
    sources: dict[str, str] = {}
    for each in gradients(graph):
        maker = graph.producers[each.value.name]
        if each.value.dtype in HALF and isinstance(maker, Call):
            wide = cast_call(each.value, "float32", f"{each.value.name}.wide", maker)
            (value,) = wide.outputs
            assert value is not None
            narrow = cast_call(value, each.value.dtype, f"{each.value.name}.sum", maker)
            calls += [wide, narrow]
            sources[each.target] = f"{each.value.name}.sum"
    return with_sources(graph, calls, sources)


def _as_they_are(graph: LogicalGraph) -> LogicalGraph:
    """Conversions of gradients to a wider dtype wait for the sum."""
    paths = passed_to_gradients(graph)

    def waits(node: object) -> bool:
        if not isinstance(node, Call) or node.op not in CASTS:
            return False
        (made,) = node.outputs
        if made is None or made.name not in paths:
            return False
        source = graph.values[_operand(node)]
        return source.dtype in HALF and holds(made.dtype, source.dtype)

    nodes = (_waiting(graph, node) if waits(node) else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _waiting(graph: LogicalGraph, node: object) -> Call:
    assert isinstance(node, Call)
    (made,) = node.outputs
    assert made is not None
    source = graph.values[_operand(node)]
    return cast_call(source, made.dtype, made.name, node, "weft.cast_whole")


def _operand(node: Call) -> str:
    (ref,) = (arg for arg in node.args if isinstance(arg, Ref))
    return ref.name
