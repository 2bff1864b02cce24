"""How uneven the stages of a pipeline are, against the stages that a plan cuts."""

from __future__ import annotations

import numpy as np
import pytest

from search.jobs import begun, decoder, dense, step_of
from weft.compiler.context import Options
from weft.compiler.stages.balance import even_stages
from weft.ir.logical import Call
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.shared_work import uneven_stages, unevenness_of


@pytest.mark.parametrize(
    ("blocks", "outside", "stages", "turns", "expected"),
    [
        (8, 0.0, 4, 1, 1.0),
        (8, 0.0, 1, 1, 1.0),
        # Three stages of three blocks, three, and two.
        (8, 0.0, 3, 1, 9 / 8),
        # A head as dear as two blocks is with two of them, of eight: (2, 2, 2, 2 and the head).
        (8, 0.2, 2, 1, 1.0),
        (8, 0.2, 4, 1, 4 * 0.3),
        # Blocks are cut where they would be 4 / 3 of the mean as a whole.
        (6, 0.0, 4, 1, 1.0),
        # A head that is dearer than an even share stands alone.
        (8, 0.5, 8, 1, 4.0),
        # Eight parts in two turns: of halves of blocks three in each but the last, which is the head alone.
        (8, 0.2, 4, 2, 4 * 0.35),
    ],
)
def test_the_busiest_stage(
    blocks: int, outside: float, stages: int, turns: int, expected: float
) -> None:
    assert unevenness_of(blocks, outside, stages, turns) == pytest.approx(expected)


def test_layers_without_numbered_blocks_are_parts_of_stages() -> None:
    work = begun(step_of(dense(*[64] * 9), 16, 64), "h100x8").lower_bounds.work
    candidates = CandidateTable.of(tuple(Candidate(1, stages=stages) for stages in (2, 4, 8)))
    assert work.unevenness(candidates).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_points_are_as_uneven_as_their_stages() -> None:
    candidates = CandidateTable.of(
        (Candidate(8), Candidate(2, stages=4), Candidate(8, stages=2), Candidate(2, stages=4))
    )
    assert uneven_stages(candidates, 8, 0.2).tolist() == pytest.approx([1.0, 1.2, 1.0, 1.2])


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_cut_about_so(stages: int) -> None:
    """In seconds, of the forward and its backward."""
    state = begun(decoder(8), "h100x4")
    graph, work = state.facts.step.graph, state.lower_bounds.work
    calls = [call for call in graph.of_kind(Call) if call.phase.kind == "forward"]
    stage_of = even_stages(graph, calls, stages, Options().cost_model)
    taken = np.zeros(stages)
    for call in calls:
        first = next(value for value in call.makes if value is not None)
        taken[stage_of[first.name]] += state.facts.machine.costs.of_call(0, call.first).seconds
    expected = taken.max() / taken.mean()
    assert work.unevenness(CandidateTable.of([Candidate(1, stages=stages)]))[0] == pytest.approx(
        expected, rel=0.2
    )
