"""The places of a model's modules and live tensors: compared before every step, which reads what was compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.program.live.holds import named_variables
from weft.program.live.laid import parts_of
from weft.runtime.memory.state import Variables
from weft.tensor import GlobalTensor

# Behind all that stands in a model.
_END = object()
_locals = attrgetter("locals")


@final
class LivePlaces:
    """The places of a model's parameters and buffers.

    Args:
        variables: of the ranks of this process; of plain tensors, the memory that a step works with.
    """

    def __init__(self, model: nn.Module, variables: Mapping[int, Variables]) -> None:
        # The dicts of modules, and all that was in them, in order.
        self._spaces: list[dict[str, Any]] = []
        self._held: list[Any] = []
        # Where each tensor and module stands, and what it was.
        self._slots: list[tuple[str, dict[str, Any], str]] = []
        self._tensors: list[Any] = []
        plain: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            for space in (module._parameters, module._buffers, module._modules):
                names = [name for name, tensor in space.items() if tensor is not None]
                if names:
                    self._spaces.append(space)
                    self._held += space.values()
                    self._slots += [(f"{path}.{x}" if path else x, space, x) for x in names]
                    self._tensors += [space[name] for name in names]
        self._held.append(_END)
        (first, *_) = variables.values()
        every = self._every = named_variables(model)
        self._variables = variables
        self._global = [each for each in every.values() if isinstance(each, GlobalTensor)]
        self._locals = list(map(_locals, self._global))
        if not any(isinstance(tensor, GlobalTensor) for tensor in every.values()):
            plain = every
        self._plain = [tensor for key, tensor in plain.items() if key in first]
        self._memory = [first[key] for key in plain if key in first]
        self._pointers = list(map(Tensor.data_ptr, self._memory))

    def check(self) -> None:
        """Check that the tensors are those that were compiled; some microseconds.

        Raises:
            UserError: naming a tensor or module that was replaced by another, removed or converted.
        """
        now = chain(chain.from_iterable(map(dict.values, self._spaces)), (_END,))
        if not all(map(is_, now, self._held)):
            self._check_each()
        if not all(map(is_, map(_locals, self._global), self._locals)):
            raise UserError(
                "a tensor of the compiled model was exchanged with another one (torch.utils.swap_tensors), and the "
                "program works with its memory of before; write values into it, tensor.copy_(…)"
            )
        self.take_data()

    def check_laid(self) -> None:
        """Check, where the program is closed, that the live tensors still have the memory that it worked with.

        Raises:
            UserError: naming one that was released, or laid anew by another program.
        """
        for key, tensor in self._every.items():
            parts = parts_of(tensor) if isinstance(tensor, GlobalTensor) else None
            if (parts is None) != bool(self._plain) or any(
                part.data_ptr() != self._variables[rank][key].data_ptr()
                for rank, part in (parts or {}).items()
                if key in self._variables.get(rank, {})
            ):
                raise UserError(
                    f"this program was closed, and {key} was released or laid anew since, so the program no longer has "
                    "its values; take them from the model, weft.whole(tensor), or from a program that is open"
                )

    def take_data(self) -> None:
        """Write values that were put into `tensor.data` of ordinary tensors into the memory that steps work with.

        Raises:
            UserError: where one has become another shape or dtype.
        """
        if list(map(Tensor.data_ptr, self._plain)) != self._pointers:
            self._write_back()

    def _check_each(self) -> None:
        """Something was replaced, or has come, which may: it is no part of the step."""
        for (text, space, name), tensor in zip(self._slots, self._tensors, strict=True):
            if space.get(name) is not tensor:
                raise _other(text, tensor, space.get(name))
        for (text, _, name), other in zip(self._slots, self._in_order(), strict=True):
            if name != other:
                raise UserError(
                    f"{text} was put into another place in its module after the step was compiled, which goes on in "
                    "the order of before; close the program and compile again"
                )

    def _in_order(self) -> Iterator[str]:
        """The names in `_slots`, in the order in which they stand now."""
        known = {(id(space), name) for _, space, name in self._slots}
        for space in self._spaces:
            yield from (name for name in space if (id(space), name) in known)

    def _write_back(self) -> None:
        with torch.no_grad():
            for tensor, memory in zip(self._plain, self._memory, strict=True):
                if tensor.data_ptr() != memory.data_ptr():
                    if tensor.shape != memory.shape or tensor.dtype != memory.dtype:
                        raise UserError(
                            f"a tensor {memory.dtype} {list(memory.shape)} of the compiled model has become "
                            f"{tensor.dtype} {list(tensor.shape)}; close the program before the model is converted"
                        )
                    memory.copy_(tensor)
                    tensor.data = memory.detach()


def _other(text: str, before: Any, now: Any) -> UserError:
    """The error for a module or tensor that another one, or nothing, is in the place of."""
    kind = "module" if isinstance(before, nn.Module) else "tensor"
    change = "removed" if now is None else f"replaced by another {kind}"
    writing = "write values into it (tensor.copy_(…), load_state_dict without assign=True), or "
    would_do = writing if kind == "tensor" and now is not None else ""
    return UserError(
        f"{text} was {change} after the step was compiled, which goes on with the one before; {would_do}close the "
        "program, weft.release(model) and compile again"
    )
