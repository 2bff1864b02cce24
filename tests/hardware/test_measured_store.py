"""What is kept of the machine at hand: found again for the nearest number of ranks, and said to be so."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest

from mutations import mutated
from weft.errors import UserError
from weft.hardware import measured_store
from weft.hardware.costs import Cost, default_device
from weft.hardware.durations import call_text, exchange_text
from weft.hardware.measured_costs import (
    MeasuredCosts,
    Measurements,
    Roofline,
    Sample,
    SizedSample,
    from_json,
    to_json,
)
from weft.hardware.measured_store import (
    load_measured_costs,
    load_measurements,
    store_measurements,
    stored_measurements,
    this_machine,
)
from weft.ops import OpCall, Operand
from weft.ops.call import TensorSpec
from weft.units import Bytes, Seconds

SPEC = TensorSpec((4, 4), "float32")
CALL = OpCall("aten.mm.default", (Operand(0), Operand(1)), (), (SPEC, SPEC), (SPEC,))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measurements(
    ranks: int, processes: int | None = None, threads: int = 1, seconds: float = 1.0
) -> Measurements:
    count = ranks if processes is None else processes
    facts = {"device": "cpu", "ranks": ranks, "processes": count, "threads": threads}
    calls = {call_text(CALL): Sample(Seconds(seconds), 0.1, Seconds(0.5))}
    return Measurements({**this_machine(), **facts}, calls)


def seconds(ranks: int, processes: int | None = None, threads: int | None = None) -> float:
    found = load_measurements(ranks, "cpu", processes, threads)
    assert found is not None
    return found.of_call(0, CALL).seconds


def test_nothing_is_found_where_nothing_was_measured() -> None:
    assert load_measurements(2) is None
    cost = load_measured_costs(2).of_call(0, CALL)
    assert cost.seconds == load_measured_costs(2).usual.of_call(0, CALL).seconds
    assert "weft measure" in cost.estimate


def test_what_is_kept_is_found_as_it_is() -> None:
    path = store_measurements(measurements(2))
    assert path.name == "cpu_2_ranks_2_processes_1_threads.json"
    assert {path, path.parent / "planned"} == set(path.parent.iterdir())
    assert stored_measurements() == (measurements(2),)
    found = load_measurements(2)
    assert found is not None
    assert found.of_call(0, CALL) == Cost(Seconds(1.0), 0.1)


def test_later_measurements_join_those_before() -> None:
    store_measurements(measurements(1))
    points = (SizedSample(Bytes(8), Seconds(1.0)),)
    store_measurements(Measurements(measurements(1).machine, {}, {"AdamW": points}))
    (found,) = stored_measurements()
    assert call_text(CALL) in found.calls
    assert found.updates == {"AdamW": points}


def test_the_nearest_set_up_stands_in_and_says_so() -> None:
    store_measurements(measurements(1, seconds=1.0))
    store_measurements(measurements(2, seconds=2.0))
    store_measurements(measurements(2, 1, seconds=3.0))
    store_measurements(measurements(4, seconds=4.0))
    store_measurements(measurements(4, threads=2, seconds=5.0))
    assert [seconds(n) for n in (1, 2, 3, 8)] == [1.0, 2.0, 4.0, 4.0]
    assert seconds(2, 1) == 3.0
    assert seconds(4, threads=2) == 5.0
    found = load_measurements(3)
    assert found is not None
    assert found.of_call(0, CALL).estimate == (
        "measured with 4 ranks in place of 3, 4 processes in place of 3"
    )


def test_another_machine_and_another_torch_are_not_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store_measurements(measurements(1))
    other = {**this_machine(), "torch": "1.0"}
    monkeypatch.setattr(measured_store, "this_machine", lambda: other)
    assert load_measurements(1) is None


def test_other_devices_are_told_apart() -> None:
    store_measurements(measurements(1))
    assert load_measurements(1, "cuda") is None


def test_damaged_files_are_named() -> None:
    path = store_measurements(measurements(1))
    path.write_text("{}")
    with pytest.raises(UserError, match=rf"{path.name}: no file of measured costs.*weft measure"):
        load_measurements(1)
    store_measurements(measurements(1))  # as the message says
    assert seconds(1) == 1.0


SIZES = (SizedSample(Bytes(8), Seconds(1.0)), SizedSample(Bytes(16), Seconds(2.0), 0.1))
FULL = Measurements(
    {"processor": "a", "cores": 2, "torch": ""},
    {"a": Sample(Seconds(1.5)), "b": Sample(Seconds(1e-6), 0.1, Seconds(2.0))},
    {"AdamW": SIZES},
    {"transfer of 2": SIZES},
    act=Seconds(1e-6),
    memory=Bytes(2**30),
    roofline=Roofline(1e12, 1e11, Seconds(1e-6)),
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (str(2**30), "Infinity"),
        (str(2**30), "9" * 400),
        ("1.5", "9" * 400),
        ("[16,", "[8,"),
        ("[8,", f"[{'9' * 400},"),
        ("1000000000000.0", "0.0"),
        ("{", "[" * 100_000),
    ],
)
def test_figures_that_are_none_are_told(before: str, after: str) -> None:
    text = to_json(FULL)
    assert from_json(text, "a.json") == FULL
    assert before in text
    with pytest.raises(UserError, match=r"a\.json: .*run `weft measure` again"):
        from_json(text.replace(before, after, 1), "a.json")


def test_files_with_mistakes_are_read_or_told() -> None:
    costs = MeasuredCosts(FULL, default_device("cpu"))
    for broken in mutated(to_json(FULL), 400):
        with suppress(UserError):  # all else fails the test
            costs = MeasuredCosts(from_json(broken, "a.json"), default_device("cpu"))
        assert costs.of_update(0, "AdamW", Bytes(12)).seconds >= 0


needs_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users as of POSIX")


@needs_users
def test_what_others_may_write_to_decides_no_plan(folder: Path) -> None:
    path = store_measurements(measurements(1))
    for place, mend in ((folder, "chmod go-w"), (path.parent, "chmod go-w"), (path, "delete it")):
        before = place.stat().st_mode
        place.chmod(before | 0o002)
        with pytest.raises(UserError, match=rf"{re.escape(str(place))}.*{mend}.* set WEFT_CACHE"):
            load_measurements(1)
        place.chmod(before)
    assert seconds(1) == 1.0
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others may write"):
        store_measurements(measurements(1))
    folder.chmod(0o700)
    path.chmod(0o666)
    store_measurements(measurements(1))  # the file is made anew
    assert seconds(1) == 1.0


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.write_text("a file in its place")
    with pytest.raises(UserError, match="set WEFT_CACHE to a folder"):
        store_measurements(measurements(1))


def test_what_was_not_measured_goes_by_the_roofline_and_the_links() -> None:
    points = (SizedSample(Bytes(1), Seconds(1.0)), SizedSample(Bytes(101), Seconds(2.0)))
    found = Measurements(
        measurements(2).machine,
        exchanges={exchange_text("transfer", 2): points},
        roofline=Roofline(1e3, 1e6, Seconds(0.5)),
    )
    store_measurements(found)
    costs = load_measurements(2)
    assert costs is not None
    assert (costs.device.link, costs.device.latency) == (100.0, 1.0)
    cost = costs.of_call(0, CALL)
    assert cost.seconds == pytest.approx(0.5 + 2 * 4**3 / 1e3)
    assert cost.estimate == "aten.mm.default was not measured"
