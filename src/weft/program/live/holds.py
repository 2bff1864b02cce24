"""The tensors that open programs hold: those of their models, which keep layout and memory, and those of elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from weft.errors import UserError
from weft.layout import Layout, Placement, Shares
from weft.program.agreement import told
from weft.runtime.world.world import World
from weft.tensor import GlobalTensor

# By program, the tensors of elsewhere that it reads.
_constants: WeakKeyDictionary[Any, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


@final
class LiveHold:
    """The hold on a live global tensor, which is its `hold`.

    Attributes:
        programs: that are open and read the tensor, or write it.
        stored: the axis along which its layout is only how it is stored, as ZeRO lays it, and says
            nothing of how it is used; None where there is none.
    """

    def __init__(self, stored: int | None) -> None:
        self.programs: WeakSet[Any] = WeakSet()
        self.stored = stored


@final
@dataclass(frozen=True)
class Lying:
    """The layouts of those tensors of a model that open programs hold.

    Attributes:
        layouts: by key.
        stored: by key, the axis of `LiveHold.stored`.
        shares: in which they are stored, by key, those that are.
    """

    layouts: Mapping[str, Layout]
    stored: Mapping[str, int]
    shares: Mapping[str, Shares]

    def homes(self, placements: Sequence[Placement]) -> dict[str, int] | None:
        """The stage of each, where stages run on `placements`; None where nothing is held.

        Raises:
            UserError: naming one that lies on ranks where no stage is.
        """
        for key, layout in self.layouts.items():
            if layout.placement not in placements:
                raise UserError(
                    f"{key} lies on {layout.placement} for another program that is open, and no part of this one runs "
                    "there; compile both for the same placement and stages, or close the other one"
                )
        found = {key: placements.index(x.placement) for key, x in self.layouts.items()}
        return found or None


def named_variables(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by key; a tensor with several names stands under the first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def global_variables(model: nn.Module) -> dict[str, Any]:
    """Those parameters and buffers that are global tensors, by key."""
    return {key: x for key, x in named_variables(model).items() if isinstance(x, GlobalTensor)}


def lying(model: nn.Module, world: World) -> Lying:
    """The layouts of those tensors of a model that open programs hold: another program must take them so.

    A program that nobody closed ends on each process in its own time; it counts until it has ended
    on all. Every process must call it.
    """
    own = "\n".join(held_names(model))
    names = {name for text in told(world, "what lies", lambda: own) for name in text.split("\n")}
    held = {key: x for key, x in global_variables(model).items() if key in names}
    return Lying(
        {key: x.spec.layout for key, x in held.items()},
        {key: x.hold.stored for key, x in held.items() if x.hold and x.hold.stored is not None},
        {key: x.shares for key, x in held.items() if x.shares is not None},
    )


def held_names(model: nn.Module) -> list[str]:
    """The names of tensors that open programs of this process hold."""
    return [key for key, x in global_variables(model).items() if x.hold and x.hold.programs]


def hold(model: nn.Module, program: Any) -> None:
    """Note that a program works with the tensors of a model until `let_go`."""
    for tensor in global_variables(model).values():
        tensor.hold.programs.add(program)


def let_go(model: nn.Module, program: Any) -> None:
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
            f"an open program reads {key} as a constant of its step, and would not see how it goes on; give both "
            'models as one to both programs, nn.ModuleDict({"model": …, "other": …}), or close that program'
        )
