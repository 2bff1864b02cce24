"""Checks around a call of a program: no other thread that works with it, no mode of torch that breaks it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from weft.errors import UserError
from weft.runtime.world.world import World
from weft.strategy.precision import Precision
from weft.tracebacks import shortened

P = ParamSpec("P")
T = TypeVar("T")

_locks: WeakKeyDictionary[World, threading.RLock] = WeakKeyDictionary()


def lock_of(world: World) -> threading.RLock:
    """The lock that is held while a program works, or one is compiled; the thread that holds it may call on.

    Of several ranks it is one for all programs: they share threads and the order of calls. Programs of a lone rank have
    one each.
    """
    if world.size == 1:
        return threading.RLock()
    return _locks.setdefault(world, threading.RLock())


class Working(Protocol):
    """Something that works with ranks, and its lock."""

    working: threading.RLock

    @property
    def world(self) -> World: ...


Own = TypeVar("Own", bound=Working)


def one_at_a_time(call: Callable[Concatenate[Own, P], T]) -> Callable[Concatenate[Own, P], T]:
    """A method that refuses to begin in a forked process, or while another thread works with the same ranks.

    Raises:
        UserError: names the method.
    """
    name = f"program.{call.__name__.lstrip('_')}"

    @wraps(call)
    @shortened
    def alone(self: Own, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with at_work(self.world, name, self.working):
            return call(self, *args, **kwargs)

    return alone


@contextmanager
def at_work(world: World, what: str, lock: threading.RLock) -> Iterator[None]:
    """While this lasts, no other thread works with the ranks of a world.

    Args:
        world: of this process, or of the one that it was forked from.
        what: begins, for errors.
        lock: of the world (`lock_of`).

    Raises:
        UserError: in a forked process, or where another thread has the lock.
    """
    world.check_process()
    if not lock.acquire(blocking=False):
        raise UserError(
            f"{what} was called while another thread works with the program, or with another one of the same ranks; "
            "call programs from one thread at a time, with a lock around it where several do"
        )
    try:
        yield
    finally:
        lock.release()


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_modes(what: str, device_type: str, precision: Precision | None, trains: bool) -> None:
    """Check that no autocast and no inference mode is around a call; some 0.1 µs.

    Args:
        what: is called.
        device_type: where the program runs.
        precision: of the program, whose autocast may be around it, too.
        trains: whether it does; evaluation may be in inference mode.

    Raises:
        UserError: names what would do.
    """
    if trains and torch.is_inference_mode_enabled():
        raise UserError(
            f"{what} in torch.inference_mode(): it trains, for which autograd must be there; call it outside. "
            "torch.no_grad() around it is no matter, and programs of evaluation run in inference mode too"
        )
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        name = _NAMES.get(dtype, str(dtype))
        if precision is None or name != precision.compute:
            raise UserError(
                f"{what} in torch.autocast({device_type!r}, {dtype}), which has no effect on a step that is compiled: "
                f"compile it with weft.Strategy(precision={name!r}), or leave autocast out; inside of the loss "
                "function it counts"
            )
