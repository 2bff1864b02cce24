"""The kinds of strategies that people write by hand."""

from __future__ import annotations

from weft.search.candidate import Candidate
from weft.search.candidate_table import KINDS, CandidateTable, kinds_of


def test_all_points_by_hand_have_a_kind() -> None:
    schedules = {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved": "interleaved",
        "zero_bubble": "zero bubble",
    }
    piped = [Candidate(1, stages=2, micro_batches=4, schedule=schedule) for schedule in schedules]
    candidates = CandidateTable.of(
        [*piped, Candidate(1, 2, layouts="sequence"), Candidate(2, zero=2)]
    )
    found = [KINDS[number] for number in kinds_of(candidates)]
    assert found == [*schedules.values(), "Megatron grid", "ZeRO 2"]
