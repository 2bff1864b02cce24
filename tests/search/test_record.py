"""Records of searches are read back as they were, and nothing else is."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import weft
from mutations import mutated
from search.jobs import layers
from weft.errors import UserError
from weft.hardware.topology_files import topology
from weft.planning.machine import machine_of
from weft.search.candidate import Candidate
from weft.search.measures import Measures, TooSlow, Unplannable
from weft.search.record import Learned, Probe, SearchRecord
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

TOOK = Measures(Seconds(1.5), Bytes(3), Seconds(0.25), Seconds(0.1))
RECORD = SearchRecord(
    Strategy(batch={"*": weft.split(0)}, micro_batches=2, grid=(2,)),
    Strategy(micro_batches=2),
    "step",
    "machine",
    Learned(
        {"a": TOOK, "b": Unplannable("no room")},
        {"c": TooSlow(Seconds(2.0))},
        {Candidate(2, 2, layouts="columns", outer=True): TOOK, Candidate(4): Unplannable("no")},
        {Candidate(2): Probe(TOOK, 0.5), Candidate(1): Probe(None, 0.0)},
    ),
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECORD.save(tmp_path / "a.search.json")
    assert SearchRecord.load(tmp_path / "a.search.json") == RECORD
    assert [each.name for each in tmp_path.iterdir()] == ["a.search.json"]


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("best", 3),
        ("best", "no: strategy"),
        ("step", None),
        ("answers", []),
        ("answers", {"a": [1, 2, 3]}),
        ("answers", {"a": [float("nan"), 2, 3, 4]}),
        ("answers", {"a": [-1.0, 2, 3, 4]}),
        ("answers", {"a": [True, 2, 3, 4]}),
        ("longer", {"a": float("inf")}),
        ("answers", {"a": [10**400, 2, 3, 4]}),
        ("longer", {"a": 10**400}),
        ("weft search", 0),
        ("weft", "0.0.1"),
    ],
)
def test_what_is_none_is_told(tmp_path: Path, entry: str, wrong: Any) -> None:
    path = tmp_path / "a.search.json"
    RECORD.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: wrong}))
    with pytest.raises(UserError, match=r"a\.search\.json"):
        SearchRecord.load(path)


def row_of(**changed: object) -> list[object]:
    """The row of a candidate, with coordinates that it cannot have."""
    return [*{**asdict(Candidate(2)), **changed}.values()]


@pytest.mark.parametrize(
    ("entry", "row", "said"),
    [
        ("points", [*row_of()[:-1], [1, 2, 3, 4]], "expected the 12 coordinates of a candidate"),
        ("points", [*row_of(data=0), [1, 2, 3, 4]], "expected a candidate's data, got 0"),
        ("points", [*row_of(data=True), [1, 2, 3, 4]], "expected a candidate's data, got True"),
        ("points", [*row_of(layouts="rows"), [1, 2, 3, 4]], "candidate's layouts, got 'rows'"),
        (
            "points",
            [*row_of(layouts=["data"]), [1, 2, 3, 4]],
            r"candidate's layouts, got \['data'\]",
        ),
        ("points", [*row_of(schedule="soon"), [1, 2, 3, 4]], "candidate's schedule, got 'soon'"),
        ("points", [*row_of(zero=True), [1, 2, 3, 4]], "expected a candidate's zero, got True"),
        ("points", [*row_of(outer=0), [1, 2, 3, 4]], "expected a candidate's outer, got 0"),
        ("points", [*row_of(recompute=-1), [1, 2, 3, 4]], "a candidate's recompute, got -1"),
        ("looks", [*row_of(), None, "soon"], "a number that is not below 0, got 'soon'"),
    ],
)
def test_a_coordinate_that_is_none_is_told(
    tmp_path: Path, entry: str, row: list[object], said: str
) -> None:
    path = tmp_path / "a.search.json"
    RECORD.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: [row]}))
    with pytest.raises(UserError, match=said):
        SearchRecord.load(path)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"weft search": 1}'])
def test_other_texts_are_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.search.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"record of a search .*cannot be read"):
        SearchRecord.load(path)
    with pytest.raises(UserError, match="cannot read"):
        SearchRecord.load(tmp_path)


def test_a_path_that_is_none_is_told() -> None:
    for call in (SearchRecord.load, RECORD.save):
        with pytest.raises(UserError, match="cannot (read|write) the record of .*null"):
            call("a\0b")


def test_texts_with_mistakes_are_read_or_told(tmp_path: Path) -> None:
    path = tmp_path / "a.search.json"
    RECORD.save(path)
    text = json.dumps(json.loads(path.read_text()), indent=1)
    for broken in mutated(text, 300):
        path.write_text(broken)
        with suppress(UserError):  # all else fails the test
            SearchRecord.load(path)


def test_machines_with_other_figures_have_other_fingerprints() -> None:
    names = ("h100x2", "h100x4", "v100x4", "flexflow-p100x4", "flexflow-k80x4")
    prints = [machine_of(name).fingerprint for name in names]
    assert len(set(prints)) == len(names)
    assert prints == [machine_of(topology(name)).fingerprint for name in names]


def test_measures_count_for_the_same_step_and_machine_only() -> None:
    step, machine = layers(), machine_of("h100x2")
    found = weft.search(step, "h100x2", moves=3).record
    assert found.learned_of(step, machine, Strategy()) == found.learned
    assert found.learned_of(step, machine_of("h100x4"), Strategy()) == Learned()
    # In another precision candidates take something else; strategies say theirs.
    other = found.learned_of(step, machine, Strategy(precision=weft.Precision(compute="bf16")))
    assert other == Learned(found.learned.answers, found.learned.longer)
    assert other.answers


@pytest.mark.parametrize(
    "fixed",
    [
        {"in_flight": (2, 1)},
        {"zero": {"0.*": None, "*": weft.Zero(3)}},
        {"zero": {"*": weft.Zero(3), "0.*": None}},
    ],
)
def test_points_count_no_more_where_all_of_them_take_something_else(fixed: Any) -> None:
    """Zero of a level is a coordinate of a candidate; by patterns, in their order, it is not."""
    step, machine = layers(), machine_of("h100x2")
    made = replace(RECORD, step=step.fingerprint, machine=machine.fingerprint)
    same = replace(made, fixed=Strategy(**fixed))
    assert made.learned_of(step, machine, Strategy(zero=weft.Zero(3))).candidates
    assert same.learned_of(step, machine, Strategy(**fixed)).candidates
    for record, other in ((made, Strategy(**fixed)), (same, Strategy())):
        found = record.learned_of(step, machine, other)
        assert (found.candidates, found.answers) == ({}, RECORD.learned.answers)
    if "zero" in fixed:
        turned = Strategy(zero=dict(reversed(fixed["zero"].items())))
        assert not same.learned_of(step, machine, turned).candidates


def test_points_count_no_more_where_a_layout_is_free_again() -> None:
    """They may be far quicker without it; with one more they are about as quick as before."""
    step, machine = layers(), machine_of("h100x2")
    pins: list[dict[str, Any]] = [
        {entry: {"0.*": weft.split(0)}} for entry in ("parameters", "batch", "activations")
    ]
    others = {"signatures": {"relu": "B -> B"}}, {"zero": weft.Zero(3, axis=1)}
    for pin in (*pins, *others):
        fixed = Strategy(**pin)
        made = replace(RECORD, fixed=fixed, step=step.fingerprint, machine=machine.fingerprint)
        for same in (fixed, replace(fixed, micro_batches=2)):
            assert made.learned_of(step, machine, same).candidates
        free = made.learned_of(step, machine, Strategy())
        assert (free.candidates, free.answers) == ({}, RECORD.learned.answers)
    more = replace(made, fixed=Strategy()).learned_of(step, machine, Strategy(**pins[0]))
    assert more.candidates
