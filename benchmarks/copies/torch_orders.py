"""The acts of torch's pipeline schedules on each rank, how long they take, and the slots of activations that they need.

torch 2.15 counts these slots (`analyze_pipeline_activation_liveness`). The torch that runs here is older and lacks the
function, so `slots` counts as its documentation and its tests say: an activation lives from its forward to its full
backward, or to the weights' part of a split one, both included, at the places of a rank's list of acts; there are as
many slots as activations that live at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from torch.distributed.pipelining import schedules

# Forward, whole backward, backward of inputs, backward of weights; a whole one takes two seconds.
SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Act(NamedTuple):
    """One act: a letter of `SECONDS`, its stage and its micro-batch."""

    kind: str
    stage: int
    micro: int


# The places of a rank's list; at some of them several acts run as one.
Places: TypeAlias = "list[list[Act]]"


def orders(name: str, home: Sequence[int], micro_batches: int) -> list[Places]:
    """The acts of each rank.

    Args:
        name: of a class of `torch.distributed.pipelining.schedules`.
        home: the rank of each stage.
        micro_batches: of a step.

    Raises:
        ValueError: where torch has no such schedule for so many micro-batches.
    """
    made = getattr(schedules, name)
    own = [_stage(number, home) for number, rank in enumerate(home) if not rank]
    single = issubclass(made, schedules.PipelineScheduleSingle)
    built = made(own[0] if single else own, micro_batches, loss_fn=lambda *_: None)
    ranks = range(max(home) + 1)
    found = [[list(_acts(each)) for each in built.pipeline_order[rank] if each] for rank in ranks]
    found = [[acts for acts in places if acts] for places in found]
    return [_from_zero(places) for places in found] if single else found


def _stage(number: int, home: Sequence[int]) -> Any:
    """All that torch's schedules ask of a stage when they list its acts."""
    return SimpleNamespace(
        stage_index=number,
        num_stages=len(home),
        group_size=max(home) + 1,
        group_rank=home[number],
        is_first=number == 0,
        is_last=number == len(home) - 1,
        has_backward=True,
        stage_index_to_group_rank=dict(enumerate(home)),
        device="cpu",
        submod=None,
    )


def _acts(action: Any) -> Iterator[Act]:
    for each in action.sub_actions or (action,):
        if each.computation_type.value in SECONDS:
            yield Act(each.computation_type.value, each.stage_index, each.microbatch_index)


def _from_zero(places: Places) -> Places:
    """With micro-batches counted from 0: the list of torch 2.13 counts the last rank's forwards of 1F1B from 1."""
    forwards = iter(range(len(places)))
    return [
        [act._replace(micro=next(forwards)) if act.kind == "F" else act for act in acts]
        for acts in places
    ]


def slots(places: Places) -> int:
    """The most activations that a rank keeps at a time."""
    begin: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for place, acts in enumerate(places):
        begin.update({(act.stage, act.micro): place for act in acts if act.kind == "F"})
        end.update({(act.stage, act.micro): place for act in acts if act.kind in "BW"})
    places_of = range(len(places))
    return max(sum(begin[key] <= place <= end[key] for key in begin) for place in places_of)


def seconds(ranks: Sequence[Places], stages: int) -> int:
    """Seconds of a step in which each rank keeps its list, and what passes between stages takes no time.

    Raises:
        ValueError: where the lists wait for each other.
    """
    left = [[act for acts in places for act in acts] for places in ranks]
    # When forwards ("F") and backwards of inputs ("I") have ended.
    ended: dict[Act, int] = {}
    now = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, acts in enumerate(left):
            while acts and all(need in ended for need in _needs(acts[0], stages)):
                act = acts.pop(0)
                start = max([now[rank], *(ended[need] for need in _needs(act, stages))])
                now[rank] = start + SECONDS[act.kind]
                ended[act._replace(kind="I") if act.kind == "B" else act] = now[rank]
                moved = True
    if any(left):
        raise ValueError(f"the lists of ranks wait for each other: {[acts[:1] for acts in left]}")
    return max(now)


def _needs(act: Act, stages: int) -> list[Act]:
    """What must have ended before an act."""
    if act.kind == "F":
        return [Act("F", act.stage - 1, act.micro)] if act.stage else []
    if act.kind == "W":
        return [act._replace(kind="I")]
    after = [Act("I", act.stage + 1, act.micro)] if act.stage + 1 < stages else []
    return [act._replace(kind="F"), *after]
