"""The tensors of models that open programs hold, and where they stand; they keep layout and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.layout import Layout, Placement, Shares
from weft.program.agreement import gathered
from weft.program.live.variables import parts_of
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor

# By program, the tensors of elsewhere that it reads.
_constants: WeakKeyDictionary[Any, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


@final
class LiveOwners:
    """The owner of a live global tensor: the open programs that read it, or write it.

    Attributes:
        stored: the axis along which its layout is only how it is stored, as ZeRO lays it; None if there is none.
    """

    def __init__(self, stored: int | None) -> None:
        self.programs: WeakSet[Any] = WeakSet()
        self.stored = stored


@final
@dataclass(frozen=True)
class LiveShardings:
    """The layouts of those tensors of a model that open programs hold, by key.

    With the axis of `LiveOwners.stored`, and the shares in which they are stored, of those that have them.
    """

    layouts: Mapping[str, Layout]
    stored: Mapping[str, int]
    shares: Mapping[str, Shares]

    def homes(self, placements: Sequence[Placement]) -> dict[str, int] | None:
        """The stage of each, where stages run on `placements`, else UserError; None if nothing is held."""
        for key, layout in self.layouts.items():
            if layout.placement not in placements:
                raise UserError(
                    f"{key} is on {layout.placement} for another program that is open, and no part of this one runs "
                    "there; compile both for the same placement and stages, or close the other one"
                )
        found = {key: placements.index(x.placement) for key, x in self.layouts.items()}
        return found or None


def named_variables(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by key; a tensor with several names is under the first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def global_variables(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers that are global tensors, by key."""
    return {key: x for key, x in named_variables(model).items() if isinstance(x, GlobalTensor)}


def live_shardings(model: nn.Module, world: World) -> LiveShardings:
    """The layouts of a model's tensors that open programs hold, for another program. Every process must call it.

    A program that nobody closed ends on each process in its own time; it counts until it has ended on all.
    """
    own = "\n".join(held_names(model))
    names = {
        name for text in gathered(world, "what lies", lambda: own) for name in text.split("\n")
    }
    held = {key: x for key, x in global_variables(model).items() if key in names}
    return LiveShardings(
        {key: x.spec.layout for key, x in held.items()},
        {key: x.hold.stored for key, x in held.items() if x.hold and x.hold.stored is not None},
        {key: x.shares for key, x in held.items() if x.shares is not None},
    )


def held_names(model: nn.Module) -> list[str]:
    """The names of tensors that open programs of this process hold."""
    return [key for key, x in global_variables(model).items() if x.hold and x.hold.programs]


def own_variables(model: nn.Module, program: Any) -> None:
    """Note that a program works with the tensors of a model until `disown_variables`."""
    for tensor in global_variables(model).values():
        tensor.hold.programs.add(program)


def disown_variables(model: nn.Module, program: Any) -> None:
    """Note that a program was closed."""
    for tensor in global_variables(model).values():
        if tensor.hold is not None:
            tensor.hold.programs.discard(program)
    _constants.pop(program, None)


def reads(program: Any, constants: Callable[[], Iterable[Tensor]]) -> None:
    """Note that a program reads tensors that are none of its model, wherever they lie; `constants()` gives them."""
    _constants[program] = constants


def check_unread(key: str, own: Tensor) -> None:
    """Raise UserError when an open program reads a tensor as a constant of its step."""
    if any(own is each for constants in list(_constants.values()) for each in constants()):
        raise UserError(
            f"an open program reads {key} as a constant of its step, and would not see its updates; give both "
            'models as one to both programs, nn.ModuleDict({"model": …, "other": …}), or close that program'
        )


# Behind all that is in a model.
_END = object()
_locals = attrgetter("locals")


@final
class LiveLocations:
    """The places of a model's parameters and buffers; `variables` have the memory that steps work with."""

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
        """Raise UserError, naming a tensor or module that was replaced, removed or converted; some microseconds."""
        now = chain(chain.from_iterable(map(dict.values, self._spaces)), (_END,))
        if not all(map(is_, now, self._held)):
            self._check_each()
        if self._is_exchanged():
            raise UserError(
                "a tensor of the compiled model was swapped with another tensor (torch.utils.swap_tensors), but the "
                "program uses its old memory; write values into it, tensor.copy_(…)"
            )
        self.take_data()

    def _is_exchanged(self) -> bool:
        try:
            return not all(map(is_, map(_locals, self._global), self._locals))
        except AttributeError:  # with an ordinary tensor, which has no `locals`
            return True

    def check_laid(self) -> None:
        """Raise UserError, where the program is closed, naming a tensor that no longer has the memory of then."""
        for key, tensor in self._every.items():
            parts = parts_of(tensor) if isinstance(tensor, GlobalTensor) else None
            if (parts is None) != bool(self._plain) or any(
                part.data_ptr() != self._variables[rank][key].data_ptr()
                for rank, part in (parts or {}).items()
                if key in self._variables.get(rank, {})
            ):
                raise UserError(
                    f"this program was closed, and {key} was released or moved to another layout since, so the "
                    "program no longer has its values; take them from the model, weft.whole(tensor), or from a "
                    "program that is open"
                )

    def take_data(self) -> None:
        """Write what was put into `tensor.data` of ordinary tensors into the memory that steps work with."""
        if list(map(Tensor.data_ptr, self._plain)) != self._pointers:
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

    def _check_each(self) -> None:
        """Something was replaced, or has come, which may: it is no part of the step."""
        for (text, space, name), tensor in zip(self._slots, self._tensors, strict=True):
            now = space.get(name)
            if now is tensor:
                continue
            kind = "module" if isinstance(tensor, nn.Module) else "tensor"
            change = "removed" if now is None else f"replaced by another {kind}"
            writing = (
                "write values into it (tensor.copy_(…), load_state_dict without assign=True), or "
            )
            raise UserError(
                f"{text} was {change} after the step was compiled, which still uses the old value; "
                f"{writing if kind == 'tensor' and now is not None else ''}close the program, weft.release(model) and "
                "compile again"
            )
        # The same names in the order in which they stand now.
        known = {(id(space), name) for _, space, name in self._slots}
        order = (x for space in self._spaces for x in space if (id(space), x) in known)
        for (text, _, name), other in zip(self._slots, order, strict=True):
            if name != other:
                raise UserError(
                    f"{text} was put into another place in its module after the step was compiled, which still uses "
                    "the old order; close the program and compile again"
                )
