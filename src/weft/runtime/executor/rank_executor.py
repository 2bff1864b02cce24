"""The parts that all executors of a rank share: its works, a step's frame, and that a failure is for good."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, final

from torch import Tensor

from weft.actors import Act, actor_text, when_text
from weft.errors import BatchError, NoAnswer, RankFailure, UserError
from weft.ir.alias import KINDS, Kind, Memory
from weft.ir.plan import Communicate, Compute, Feed, Hold, LocalCall, RankPlan
from weft.ops.cost import dtype_name
from weft.runtime.compiled.parts import Distinct
from weft.runtime.devices.cuda_graphs import GraphRunner
from weft.runtime.executor.work import ActFunction, Rank, Work, bind_work
from weft.runtime.failures.failure_store import PeerFailure, first_line
from weft.runtime.kernels.generated import failed_op
from weft.runtime.recording import MemoryMeter, Recorder


@final
class MeasuredStep:
    """Watches the acts of one step."""

    def __init__(self, plan: RankPlan, works: dict[int, Work]) -> None:
        self._plan = plan
        self._works = works
        self._bare = dict(works)
        self._meter = MemoryMeter()
        kinds = {register.value.name: KINDS[register.kind] for register in plan.registers}
        for id, work in self._bare.items():
            actor = plan.actors[id]
            if isinstance(actor, (Compute, Communicate)):
                inside: Kind = "activations" if isinstance(actor, Compute) else "communication"
                made = [kinds[name] for name in work.writes]
                works[id] = replace(work, act=_watched(self._meter, work, inside, made))

    def end(
        self,
        variables: Mapping[str, Tensor],
        feed: Mapping[str, Tensor],
        results: Iterable[Tensor],
    ) -> Memory:
        """Stop watching, and say what was alive at the moment when it was most.

        Args:
            variables: the rank's shards. States that the optimizer created in this step count from its start, as they
                will from the next step on; so does everything else that outlives the step and is not a result, but for
                the fixed buffers of channels: they are not tensors of the step.
        """
        self._works.update(self._bare)
        meter = self._meter
        lasting: Counter[Kind] = Counter()
        lasting["batch"] = sum(part.nbytes for part in feed.values())
        returned = {meter.number(result) for result in results}
        # Views of the batch bring its storage.
        known = returned | {meter.number(part) for part in feed.values()}
        for item in self._plan.inputs:
            tensor = variables.get(item.key)
            if item.role != "batch" and tensor is not None:
                lasting[KINDS[item.role]] += tensor.nbytes
                known.add(meter.number(tensor))
        left_out = known - returned
        for number, size, _ in tuple(meter.alive.values()):
            if number not in known:
                left_out.add(number)
                if meter.kinds[number] != "communication":
                    lasting[meter.kinds[number]] += size
        return Memory.of(meter.most(lasting, left_out))


def _watched(meter: MemoryMeter, work: Work, inside: Kind, made: Sequence[Kind]) -> ActFunction:
    """The work of an actor, whose tensors are recorded: what it makes for itself, and what it leaves."""

    def act(*arguments: Any) -> Sequence[Tensor]:
        with meter.watching(inside):
            outputs = work.act(*arguments)
        for tensor, kind in zip(outputs, made, strict=True):
            if kind in ("gradients", "host"):
                meter.mark(tensor, kind)
        return outputs

    return act


Own = TypeVar("Own", bound="RankExecutor")


class RankExecutor(ABC):
    """Runs the plan of one rank, step by step.

    Attributes:
        measured: after the first step, or the first after `measure`, the most memory that it took, by kind.
        recorder: when the acts of the last step ran.
    """

    recorder: Recorder

    def __init__(self, plan: RankPlan, rank: Rank) -> None:
        self.plan = plan
        self.measured: Memory | None = None
        self._rank = rank
        self._done = 0
        self._keys = {key for actor in plan.actors if isinstance(actor, Feed) for key in actor.keys}
        # The first failure of this rank; set once, under the lock, before anyone is woken.
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        # True if `step` has raised it; another rank may fail between two steps of this one.
        self._raised = False
        acting = (actor for actor in rank.plan.actors if not isinstance(actor, Hold))
        self._works = {actor.id: bind_work(actor, rank) for actor in acting}
        # Memory is measured in the first step.
        self._measuring: MeasuredStep | None = MeasuredStep(plan, self._works)

    @property
    def distinct_parts(self) -> tuple[Distinct, ...]:
        """The distinct parts of the segments that were to be compiled; none with ATen kernels."""
        cutter = self._rank.part_cutter
        return () if cutter is None else tuple(cutter.distinct.values())

    @property
    def replayer(self) -> GraphRunner | None:
        """The replayer of segments as CUDA graphs; None if nothing is replayed."""
        return self._rank.replayer

    @property
    def steps(self) -> int:
        """Number of the next step, for the random ops."""
        return self._rank.batches.first + self._done

    @steps.setter
    def steps(self, number: int) -> None:
        self._rank.batches.first = number - self._done

    def step(self, feed: Mapping[str, Tensor], update: bool = True) -> dict[str, Tensor]:
        """Run one step.

        Args:
            update: False keeps the gradients and adds them to those of the next step.

        Returns:
            What the plan fetches, by key: once every actor has acted; on a device with streams,
            once all work is on its way, for use on the current stream.

        Raises:
            BatchError: when an entry of the batch is missing.
            RankFailure: when an actor of this rank raised (its error is the cause), when another
                rank failed, or when nothing happened for the time-out. No later step will run.
        """
        if not self._raised:
            # Nothing is changed yet by this step, which may end at once where another rank has failed since the last.
            self._rank.batches.updated = False
        self._check(feed)
        step = self._done
        batches = self._rank.batches
        batches.fed, batches.fetched, batches.held = feed, {}, not update
        self.recorder.begin()
        try:
            for channel in self._rank.channels.values():
                channel.compare()
            self._run(step)
        except BaseException as error:
            failure = self._fail(error)
            self._raised = True
            self._failure = _bare(failure)
            raise failure from failure.__cause__
        self.recorder.end(step, self.steps)
        self._done += 1
        results = batches.fetched
        batches.fed, batches.fetched = {}, {}
        if self._measuring is not None:
            self.measured = self._measuring.end(self._rank.variables, feed, results.values())
            self._measuring = None
        return results

    @property
    def given_back(self) -> int:
        """Bytes that the first step held at its peak and no later step finds: activations, gradients, what is sent."""
        held = self.measured
        return 0 if held is None else held.activations + held.gradients + held.communication

    @property
    def updated(self) -> bool:
        """True if the last step has updated parameters, or added to gradients that are kept, be it in part."""
        return self._rank.batches.updated

    def measure(self) -> None:
        """Measure the memory of the next step, in place of one that was measured before."""
        if self._measuring is None:
            self.measured, self._measuring = None, MeasuredStep(self.plan, self._works)

    def put_numbers(self, numbers: Mapping[str, float]) -> None:
        """Write numbers into the constants [] of these keys that this rank has, for the next step."""
        for key, number in numbers.items():
            if key in self._rank.variables:
                self._rank.variables[key].fill_(number)

    def put_constants(self, tensors: Mapping[str, Tensor]) -> None:
        """Read tensors outside the model from where their data lie now; by these keys, if this rank has them.

        Raises:
            UserError: where CUDA graphs are replayed, which read the memory of before.
        """
        for key, tensor in tensors.items():
            if key not in self._rank.variables:
                continue
            own = self._rank.variables[key]
            if own.device != tensor.device:
                own.copy_(tensor)
            elif self.replayer is None:
                own.data = tensor.detach()
            elif own.data_ptr() != tensor.data_ptr():
                raise UserError(
                    f"a tensor outside the model, {dtype_name(tensor.dtype)}{list(tensor.shape)}, got other memory "
                    "(tensor.data = …, set_), and the CUDA graphs of the step read the memory of before; write values "
                    "into it, tensor.copy_(…)"
                )

    def put_checksum(self, checksum: Callable[[tuple[int, ...]], int]) -> None:
        """Put a checksum on messages of the next step among some ranks (`weft.runtime.failures.call_log`)."""
        for channel in self._rank.channels.values():
            channel.checksum = checksum(channel.ranks)

    @abstractmethod
    def close(self) -> None:
        """End the threads, and close the channels."""

    @abstractmethod
    def _run(self, step: int) -> None:
        """Run all acts of a step; what it fetches is in the rank's batches."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake whoever waits on this rank, after a failure."""

    def _explain(self, error: BaseException) -> BaseException:
        return error

    def _fail(self, error: BaseException) -> BaseException:
        """Record a failure, wake everyone who waits for this rank, and return the failure that came first.

        Other ranks' failures come from threads of their channels.
        """
        with self._lock:
            first = self._failure is None
            if self._failure is None:
                self._failure = self._explain(error)
        if first:
            cause = _bare(self._failure.__cause__ or self._failure)
            for channel in self._rank.channels.values():
                channel.abort(cause)
            self._wake()
        return self._failure

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, feed: Mapping[str, Tensor]) -> None:
        failure = self._failure
        if failure is not None and self._raised:
            text = f"rank {self.plan.rank} has already failed: {first_line(failure)}"
            raise RankFailure(text) from failure
        if failure is not None:
            self._raised = True
            raise failure from failure.__cause__
        missing = sorted(self._keys - set(feed))
        if missing:
            raise BatchError(
                f"the batch has no {', '.join(missing)}; it has {sorted(feed)}; give all leaves of the example"
            )

    def _named(self, act: Act, cause: BaseException) -> BaseException:
        if not isinstance(cause, Exception):
            return cause
        actor = self.plan.actors[act.actor]
        where = f"{actor_text(actor)} failed in {when_text(actor, act.step, act.micro)}"
        if isinstance(actor, Compute):
            calls = [node for node in actor.nodes if isinstance(node, LocalCall)]
            op = failed_op(cause, calls) if len(calls) > 1 else ""
            where += f" at {op}" if op else ""
        kind = type(cause) if isinstance(cause, PeerFailure | NoAnswer) else RankFailure
        failure = kind(f"rank {self.plan.rank}: {where}: {first_line(cause)}")
        failure.__cause__ = cause
        return failure


def _bare(failure: BaseException) -> BaseException:
    try:
        return type(failure)(*failure.args)
    except Exception:
        return RankFailure(first_line(failure))
