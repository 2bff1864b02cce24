"""The core of a program, which its parts share: plans, states, the count of steps, the last failure."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weft.compiler.pipeline import Compiled
from weft.errors import RankFailure, UserError
from weft.ir.plan import RankPlan
from weft.program.agreement import gathered, run_on_all
from weft.program.data.loading import LoadingActs
from weft.program.live.ownership import LiveLocations
from weft.program.planning.step import Step
from weft.program.planning.variants import Variants
from weft.program.training.training import Training
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.failures.failure_store import first_line
from weft.runtime.world.world import World
from weft.strategy.precision import Precision
from weft.tensor.divergence import forget
from weft.tracebacks import shortened
from weft.traces.rows import StepSpan
from weft.units import Seconds


@final
@dataclass(slots=True)
class Failed:
    """A step or an update that failed, after `number` steps.

    Attributes:
        text: of the error; the error itself would keep the program alive.
        changed: true if parameters or gradients had begun to change here.
        renew: puts new executors in place of those that failed; every process must call it.
        loaded: true if all that it may have changed was loaded since.
    """

    number: int
    text: str
    changed: bool
    renew: Callable[[], None]
    loaded: bool = False


# Steps whose waits and loads are kept: those of a long recording.
_KEPT = 4096


@final
class ProgramCore:
    """The core of a program. Threads and groups of its ranks end with it, also when nobody closes the program.

    Attributes:
        steps: made so far, with those before a loaded checkpoint; `first`: before the first one made here.
        samples, metrics: of the last step: samples over all ranks; metrics by name.
        waits, loads: by number of the step, in loops of weft's: waits for batches, and the acts that brought them.
        loading: the plan of the last loop that loads ahead; None before one.
        failed: the step or update that failed last; None if the program can continue.
        places: of the model's tensors, which are live already; compared before every step.
        close: ends threads and groups; nothing when called again.
    """

    def __init__(self, variants: Variants, step: Step, training: Training) -> None:
        self.variants = variants
        self.setting = variants.setting
        self.step = step
        self.training = training
        self.steps = self.first = self.samples = 0
        self.waits: dict[int, StepSpan] = {}
        self.loads: dict[int, LoadingActs] = {}
        self.loading: RankPlan | None = None
        self.metrics: Mapping[str, Tensor] = {}
        self.failed: Failed | None = None
        self.places = LiveLocations(self.setting.model, self.setting.variables)
        self._number = self.setting.world.calls.new_program()
        self.close = weakref.finalize(self, _close_all, variants, training)

    def note_wait(self, begin: int, end: int) -> None:
        """The batch of the next step was waited for, in nanoseconds of `perf_counter_ns`."""
        self._keep(self.waits, StepSpan(self.steps, begin, end))

    def note_load(self, acts: LoadingActs) -> None:
        """The batch of the next step was loaded by these acts."""
        self._keep(self.loads, acts)

    def _keep(self, noted: dict[int, T], found: T) -> None:
        """Note something of the next step; of many, what is oldest is forgotten."""
        if len(noted) >= _KEPT:
            del noted[next(iter(noted))]
        noted[self.steps] = found

    @property
    def waited(self) -> Seconds | None:
        """Seconds that the last step waited for its batch; None if nobody noted it."""
        wait = self.waits.get(self.steps - 1)
        return None if wait is None else Seconds((wait.end - wait.begin) / 1e9)

    @property
    def is_open(self) -> bool:
        """False once it was closed."""
        return self.close.alive

    @property
    def compiled(self) -> Compiled:
        """The plan that ran last, or is to run."""
        return self.variants.current.compiled

    @property
    def executors(self) -> Mapping[int, RankExecutor]:
        """The executors of a plan, by rank of this process."""
        return self.variants.current.executors

    def enter(self, what: str) -> int:
        """A call begins that all ranks must make; it works with what the user has put into the live tensors."""
        number = self.setting.world.calls.enter(f"{what} of program {self._number}")
        if not self.is_open:
            run_on_all(self.setting.world, "where the model lies", self.places.check_laid)
        self.places.take_data()
        return number

    def make_ready(self, call: str = "step") -> None:
        """Check that the program is open and no mode of torch around, so that it can `call`; renew failed executors.

        Raises:
            RankFailure: when parameters or gradients had begun to change on some rank before it failed, and nothing was
                loaded since; or when another process does not call it before the time-out.
        """
        self.check_open(call)
        setting, trains = self.setting, bool(self.training.optimizers)
        precision = setting.options.precision
        check_modes("the program is called", setting.placement.device_type, precision, trains)
        failed = self.failed
        if failed is None:
            return
        self.enter("recovery")
        own = f"{failed.number} {failed.changed and not failed.loaded:d}"
        texts = gathered(setting.world, "what has changed", lambda: own)
        numbers, changed = zip(*(text.split() for text in texts), strict=True)
        if len(set(numbers)) > 1 or "1" in changed:
            raise RankFailure(
                "the last failed call had changed parameters or gradients on some ranks, and not on others: "
                f"{failed.text}. Load a state that you trust with load_full_state_dict on every process, and the "
                "optimizer's with load_state_dict; then the program continues, without the gradients that were kept"
            )
        if failed.changed:
            self.training.gradients.drop()
        setting.world.reset_after_failure()
        failed.renew()
        self.failed = None

    def check_open(self, call: str) -> None:
        """Raise UserError when the program was closed; `call` is the verb for what it cannot do any more."""
        if not self.is_open:
            raise UserError(f"this program was closed, and cannot {call}; compile another one")

    def note_failure(
        self, error: BaseException, executors: Mapping[int, Any], renew: Callable[[], None]
    ) -> None:
        """A step or an update has failed: the next call recovers, by `renew` on all processes, or is refused."""
        forget()
        changed = any(executor.updated for executor in executors.values())
        self.failed = Failed(self.steps, first_line(error), changed, renew)

    def note_loaded(self) -> None:
        """Note that all state that a failed step may have changed was loaded again."""
        self.first = self.steps
        if self.failed is not None:
            self.failed.loaded = True


class ProgramPart:
    """Methods of a program, which work with its core; it has the lock that is held while it works."""

    def __init__(self, core: ProgramCore) -> None:
        self._core = core
        self.working = lock_of(self.world)

    @property
    def world(self) -> World:
        """The ranks of this process."""
        return self._core.setting.world

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._core.is_open

    @property
    def steps(self) -> int:
        """The number of steps that were made, those before a checkpoint that was loaded included."""
        return self._core.steps


def _close_all(variants: Variants, training: Training) -> None:
    try:
        variants.setting.world.check_process()
    except UserError:
        return  # threads and connections are those of the process that this one was forked from
    variants.close()
    training.close(but=variants)


P = ParamSpec("P")
T = TypeVar("T")

_locks: WeakKeyDictionary[World, threading.RLock] = WeakKeyDictionary()


def lock_of(world: World) -> threading.RLock:
    """The lock that is held while a program works, or one is compiled; the thread that holds it may call on.

    Programs of several ranks share one, as their threads and order of calls; those of a lone rank have one each.
    """
    if world.size == 1:
        return threading.RLock()
    return _locks.setdefault(world, threading.RLock())


Own = TypeVar("Own", bound="ProgramPart")


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
    """Within the context, no other thread works with the ranks of a world; `lock` is that of `lock_of`.

    Raises:
        UserError: in a forked process, or where another thread has the lock; names `what` begins.
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
    """Check that no autocast but the program's own, and no inference mode, is around a call; some 0.1 µs.

    Raises:
        UserError: names `what` is called, and what would do. Evaluation may be in inference mode.
    """
    if trains and torch.is_inference_mode_enabled():
        raise UserError(
            f"{what} in torch.inference_mode(): it trains, which needs autograd; call it outside. torch.no_grad() "
            "around it does no harm, and evaluation programs run in inference mode too"
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
