"""In which dtypes a step computes, exchanges, adds up and updates, as a strategy says it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, final, get_args

from weft.errors import StrategyError, wrong
from weft.strategy.parts import hold

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


@final
@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. None keeps the dtype of the model's own ops.

    Dtypes are "bf16", "fp16" and "fp32", or PyTorch's: "bfloat16", `torch.bfloat16`.

    Attributes:
        compute: the forward runs under autocast: matrix products and convolutions in this dtype.
            With "fp16" the loss is scaled, as `torch.amp.GradScaler` does it.
        parameters: floating-point parameters and inputs of the model are cast to this dtype
            for the forward; under ZeRO the cast parameter is sent (`param_dtype` of FSDP2's MixedPrecisionPolicy).
        reduce: of gradients that are sent between ranks (`reduce_dtype` of FSDP2,
            `grad_reduce_in_fp32` of Megatron); None for their own dtype.
        accumulate: of gradients summed over micro-batches: "fp32", or None for the gradients' own
            (`accumulate_allreduce_grads_in_fp32` of Megatron).
        masters: optimizers update float32 copies of narrower parameters, which are part of their
            states, and the parameters are these copies, rounded.
        activations: "fp32" reduces partial activations in float32, such as the
            outputs of row-parallel layers; None for their own dtype.
    """

    compute: Half | None = None
    parameters: Half | None = None
    reduce: Dtype | None = None
    accumulate: Literal["fp32"] | None = "fp32"
    masters: bool = False
    activations: Literal["fp32"] | None = None

    def __post_init__(self) -> None:
        for name, dtypes in _TAKES.items():
            given = getattr(self, name)
            found = _spelled(given)
            if found is not None and found not in dtypes:
                known = f"{', '.join(map(repr, dtypes))} or None"
                raise wrong(f"weft.Precision({name}=…)", known, given, StrategyError)
            hold(self, **{name: found})
        if not isinstance(self.masters, bool):
            raise wrong("weft.Precision(masters=…)", "True or False", self.masters, StrategyError)

    @property
    def captured(self) -> Precision:
        """The part of it that a captured step depends on."""
        return Precision(self.compute, self.parameters, masters=self.masters)

    def content(self) -> dict[str, Any]:
        """The fields that are set, as plain data."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in named if value != getattr(Precision, name)}


def precision_of(value: object) -> Precision | None:
    """The precision from a strategy's field: an object, the dtype to compute in, or None.

    Raises:
        StrategyError: when it is anything else.
    """
    if value is None or isinstance(value, Precision):
        return value
    compute = _spelled(value)
    if compute not in HALVES:
        expected = f"one of {', '.join(map(repr, HALVES))}, a weft.Precision(…), or None"
        raise wrong("precision=", expected, value, StrategyError)
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


def _spelled(value: object) -> object:
    """A dtype by weft's name, where it is PyTorch's own or one of its names."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    return _SPELLINGS.get(text, value)
