"""Measured memory of a rank: the first step of an executor under a meter, the later ones bare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from weft.ir.plan import Communicate, Compute, RankPlan
from weft.ir.queries.alias import KINDS, Kind, Memory
from weft.runtime.executor.work import ActFunction, Work
from weft.runtime.memory.notes import Meter


@final
class MeasuredStep:
    """Watches the acts of one step.

    Args:
        plan: what the rank runs.
        works: what its actors do, by id; watched until `end`.
    """

    def __init__(self, plan: RankPlan, works: dict[int, Work]) -> None:
        self._plan = plan
        self._works = works
        self._bare = dict(works)
        self._meter = Meter()
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
            variables: the rank's shards. Those that the optimizer made in this step count from its
                start, as they will from the next step on; so does everything else that outlives the
                step and is no result, but for the fixed buffers of channels: they are no tensors of
                the step.
            feed: the rank's part of the batch.
            results: what the step returns.
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


def _watched(meter: Meter, work: Work, inside: Kind, made: Sequence[Kind]) -> ActFunction:
    """The work of an actor, whose tensors are recorded: what it makes for itself, and what it leaves."""

    def act(*arguments: Any) -> Sequence[Tensor]:
        with meter.watching(inside):
            outputs = work.act(*arguments)
        for tensor, kind in zip(outputs, made, strict=True):
            if kind in ("gradients", "host"):
                meter.mark(tensor, kind)
        return outputs

    return act
