"""Random functions and generators of torch, replaced during capture in the capturing thread.

The step may read and restore the state of a generator, and draw from none that it has set. The draws of a plan depend
on its seed, the number of the step and positions in tensors. A draw by a seed or state of the step's own
(`torch.manual_seed`, `set_rng_state`, `fork_rng` around draws) would differ in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any, final
from unittest.mock import patch

import torch
from torch._C import TensorBase
from torch.utils._python_dispatch import _disable_current_modes

from weft.capture.fx.private import Refusal
from weft.capture.fx.refusals import running_line
from weft.errors import CaptureError

_SETS = ("manual_seed", "seed", "set_state")
_METHODS = (*_SETS, "get_state", "initial_seed", "get_offset", "set_offset")
_DRAWS = (
    "draws random numbers from a state of torch's generator that the step has set{place}. A compiled step does not "
    "follow that: it draws by weft's seed, the number of the step and positions in tensors. Draw once and use the "
    "tensor wherever the same numbers are needed, or draw before the step, and pass them in the batch or in a buffer"
)
_LEAVES = (
    "the step sets the state of torch's generator{place} and leaves it so, which a compiled step would not do. Set "
    "it before or after the step"
)


@final
class StepGenerator(torch.Generator):
    """Replaces a torch generator, from its current state, in the thread that creates this object.

    Attributes:
        set_at: the user's line that has set it, where that is known.
    """

    def __new__(cls, real: torch.Generator) -> StepGenerator:
        return super().__new__(cls, real.device)  # type: ignore[call-arg]

    def __init__(self, real: torch.Generator) -> None:
        self._real, self._thread = real, get_ident()
        super().set_state(real.get_state())
        self.set_at = ""
        self._left: bytes | None = None
        self._reseeded = False
        self.advance()

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name not in _METHODS:
            return own(name)
        if own("_thread") != get_ident():
            return getattr(own("_real"), name)
        if name in _SETS:
            self.set_at = running_line()
            self._reseeded |= name == "seed"
        return own(name)

    def advance(self) -> None:
        """Note one more draw from the generator."""
        with _disable_current_modes():
            torch.rand(1, device=self.device, generator=self)
        self._left = state_of(self)

    @property
    def was_set(self) -> bool:
        """True if its state is not the one that the last draw has left."""
        return state_of(self) != self._left

    @property
    def is_left_changed(self) -> bool:
        """True if it is left in a state that was set, other than by `torch.seed()`, which no program depends on."""
        return self.was_set and not self._reseeded


# For the CPU, and of the device of this thread where there is one.
_followed: ContextVar[Sequence[StepGenerator]] = ContextVar("weft_generators", default=())


@contextmanager
def generators_followed() -> Iterator[None]:
    """Within the context, this thread leaves torch's own generators as they are, and `note_draw` may refuse.

    Raises:
        CaptureError: when the block has left one in a state that it has set.
    """
    every = list(torch.cuda.default_generators)
    followed = [StepGenerator(torch.default_generator)]
    if every:  # CUDA has begun; a draw on other devices would begin there, too
        at = torch.cuda.current_device()
        followed.append(StepGenerator(every[at]))
        every[at] = followed[1]
    token = _followed.set(followed)
    try:
        with (
            patch.object(torch, "default_generator", followed[0]),
            patch.object(torch.random, "default_generator", followed[0]),
            patch.object(torch.cuda, "default_generators", tuple(every)),
        ):
            yield
    finally:
        _followed.reset(token)
    for each in followed:
        if each.is_left_changed:
            raise CaptureError(_LEAVES.format(place=_place(each)))


def note_draw(device: torch.device) -> None:
    """Called before the step draws random numbers on a device.

    Raises:
        Refusal: when it has set a state to draw from.
    """
    generators = _followed.get()
    for each in generators:
        if each.was_set:
            raise Refusal(_DRAWS.format(place=_place(each)))
    for each in generators[:1] if device.type == "cpu" else generators[-1:]:
        each.advance()


def state_of(generator: torch.Generator) -> bytes:
    """The state of a generator, also while a step is traced."""
    with _disable_current_modes():
        state = generator.get_state()
        return TensorBase.numpy(state).tobytes()  # past what notes that a step reads values


def _place(generator: StepGenerator) -> str:
    return f" ({generator.set_at.strip()})" if generator.set_at else ""


@contextmanager
def redirect_calls(
    *functions: tuple[Any, str, Callable[[Callable[..., Any]], Any]],
) -> Iterator[set[int]]:
    """Within the context, calls in this thread go to replacements; other threads call the original functions.

    Args:
        functions: owner and name of each, and the function that makes its replacement.

    Yields:
        The other threads that have called one of the functions.
    """
    own, others = get_ident(), set[int]()
    # None once this is over: torch's tables may hold methods longer.
    made: list[Callable[..., Any]] = []

    def standing(place: int, name: str, plain: Callable[..., Any]) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if made and get_ident() == own:
                return made[place](*args, **named)
            if made:
                others.add(get_ident())
            return plain(*args, **named)

        call.__name__ = name  # torch looks methods up by name, and hands this one to modes
        return call

    with ExitStack() as stack:
        for place, (owner, name, make) in enumerate(functions):
            plain = getattr(owner, name)
            made.append(make(plain))
            stack.enter_context(patch.object(owner, name, standing(place, name, plain)))
        stack.callback(made.clear)
        del functions, make
        yield others
