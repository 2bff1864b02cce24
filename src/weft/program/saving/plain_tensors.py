"""The tensors that a checkpoint takes as extras: plain and global ones, with values of their own."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from weft.errors import UserError
from weft.layout import Partial
from weft.ops.dtypes import dtype_name
from weft.program.saving.manifest import DTYPES
from weft.tensor import GlobalTensor

_DTYPES = frozenset(DTYPES.values())


def check_plain(tensor: Tensor, where: str) -> None:
    """Refuse a tensor that no file of a checkpoint can hold as it is.

    Args:
        tensor: an extra.
        where: it stands, for the error.

    Raises:
        UserError: saying what it is, and what would do.
    """
    why = _why_not(tensor)
    if why:
        raise UserError(
            f"{where} is {why[0]}; a checkpoint takes dense tensors with values: {why[1]}"
        )


def _why_not(tensor: Tensor) -> tuple[str, str] | None:
    """The kind of a tensor that cannot be saved, and what would do; None for one that can."""
    if isinstance(tensor, GlobalTensor):
        return _why_not_global(tensor)
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {list(tensor.shape)}", "give tensor.full_tensor()"
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a parameter without a shape", "run its lazy module once before"
    if tensor.is_nested:
        return "a nested tensor", "give the list of its parts, tensor.unbind()"
    return _without_plain_values(tensor)


def _why_not_global(tensor: GlobalTensor) -> tuple[str, str] | None:
    """The same of a global tensor."""
    kind = f"a global tensor of shape {list(tensor.shape)}"
    if any(isinstance(sbp, Partial) for sbp in tensor.sbp):
        return f"{kind}, of whose parts the sum is Partial", "give tensor.full()"
    if dtype_name(tensor.dtype) not in _DTYPES:
        return f"{kind} of {tensor.dtype}, which safetensors has not", "give it as another dtype"
    return None


def _without_plain_values(tensor: Tensor) -> tuple[str, str] | None:
    """The same of a tensor with a shape."""
    kind = f"of shape {list(tensor.shape)}"
    if tensor.is_meta:
        return f"a tensor {kind} on the meta device, without values", "give one with values"
    if tensor.is_quantized:
        return f"a quantized tensor {kind}", "give tensor.dequantize(), or its int_repr() and scale"
    if str(tensor.layout) != "torch.strided":
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor {kind} of layout {layout}", "give tensor.to_dense()"
    if any(getattr(tensor, "names", ())):
        return f"a tensor {kind} with named dimensions", "give tensor.rename(None)"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # Its values are elsewhere, or nowhere.
        return f"a tensor {kind} of the class {type(tensor).__name__}", "give a plain torch.Tensor"
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        return (
            f"a tensor {kind} of {tensor.dtype}, which safetensors has not",
            "give it as another dtype, as by torch.view_as_real",
        )
    return None
