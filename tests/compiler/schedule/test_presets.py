"""Priorities of named schedules: who goes first when several actors of a rank may act."""

from __future__ import annotations

from build import value
from weft.compiler.schedule.presets import Preset, with_priorities
from weft.ir.nodes import Phase, PhaseKind
from weft.ir.plan import Actor, Communicate, Compute, Feed, Hold, Transfer

MICRO_BATCHES = 4


def compute(
    id: int, kind: PhaseKind, reads: tuple[str, ...], makes: tuple[str, ...], stage: int = 0
) -> Compute:
    return Compute(id, (), reads, makes, acts=MICRO_BATCHES, phase=Phase(stage, kind))


def receive(id: int, name: str, acts: int) -> Communicate:
    transfer = Transfer(0, None, value(name), (), ())
    return Communicate(id, (transfer,), "comm:1", acts, phase=Phase(1, "forward"))


def priorities(actors: tuple[Actor, ...], around: int = 2, stages: int = 2) -> list[int]:
    """Of all actors but hold and feed."""
    rule = Preset("1f1b", stages=stages, around=around, micro_batches=MICRO_BATCHES)
    found = with_priorities(actors, rule)
    return [each.priority for each in found if isinstance(each, Compute | Communicate)]


FIRST = (
    Hold(0, ("w",)),
    Feed(1, ("x",), ("x",)),
    compute(2, "forward", ("w",), ("mask",)),
    compute(3, "forward", ("x", "mask"), ("h",)),
    compute(4, "forward", ("h",), ("sent",)),
    compute(5, "backward", ("h",), ()),
)


def test_a_forward_that_has_begun_is_ended_before_a_backward_goes_on() -> None:
    """What reads no batch has not begun it, and the first to read it waits for backwards: it would fill the memory."""
    mask, begins, goes_on, backward = priorities(FIRST)
    assert goes_on < backward < begins == mask


def test_ranks_that_take_turns_between_stages_keep_the_order_of_phases() -> None:
    mask, begins, goes_on, backward = priorities(FIRST, around=1)
    assert backward < goes_on == begins == mask


def test_a_single_stage_keeps_the_order_of_phases_as_no_other_waits_for_it() -> None:
    mask, begins, goes_on, backward = priorities(FIRST, around=1, stages=1)
    assert backward < goes_on == begins == mask


def test_a_later_stage_begins_with_what_it_receives_in_each_micro_batch() -> None:
    """Not with the batch, whose labels it has early, nor with a tied weight that comes once a step."""
    actors = (
        Hold(0, ()),
        Feed(1, ("y",), ("y",)),
        receive(2, "tied", 1),
        compute(3, "forward", ("y", "tied"), ("counts",), 1),
        receive(4, "h", MICRO_BATCHES),
        compute(5, "forward", ("h", "counts"), ("logits",), 1),
        compute(6, "forward", ("logits",), ("loss",), 1),
        compute(7, "backward", ("logits",), (), 1),
    )
    _, labels, received, begins, goes_on, backward = priorities(actors)
    assert goes_on < backward < begins == labels == received
