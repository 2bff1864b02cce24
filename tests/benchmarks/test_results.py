"""From rows to targets, the table and the page."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from torch._inductor import config

from benchmarks import isa
from benchmarks.__main__ import Clock, merged
from benchmarks.load import Load
from benchmarks.page import BEGIN, COLUMNS, END, cells, judged, page, raw
from benchmarks.pairs import AUTO, BEATEN, BEATEN_HERE, BEATEN_SLOWLY, GLOO, PAIRS, QUICK
from benchmarks.systems.table import SYSTEMS
from benchmarks.targets import Verdict, target_of, verdicts


def row(system: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "work": "gpt",
        "strategy": "data_parallel",
        "link": "host",
        "system": system,
        "seconds": seconds,
        "spread": [seconds * 0.9, seconds * 1.1],
        "rounds": 6,
        "disturbed": 0,
        "limit": None,
        "ratio_to_limit": None,
        "limit_interval": None,
        "best_peer": None,
        "ratio_to_best_peer": None,
        "ratio_spread": None,
        "ratio_interval": None,
        "against": {},
        "compile_seconds": 1.25,
        "warm_compile_seconds": None,
        "peak_bytes": 2**30,
        "losses_agree": 1e-7,
        "idle_cpu": 0.0,
        **more,
    }


def weft(seconds: float, limit: float, ratio: float, **more: Any) -> dict[str, Any]:
    """A row of weft's, with intervals of a thousandth to both sides."""
    settings = {"best_peer": "ddp", "ratio_interval": around(ratio), "limit": "limit weft"}
    ratios = {"ratio_to_limit": limit, "ratio_to_best_peer": ratio, "limit_interval": around(limit)}
    return row("weft", seconds, **{**settings, **ratios, **more})


def around(ratio: float) -> list[float]:
    return [ratio - 0.001, ratio + 0.001]


LIMIT, MEMORY = "time over limit weft", "memory over that of ddp"


def test_targets_of_the_fastest_row() -> None:
    slower = weft(1.2, 1.2, 0.9)
    faster = weft(1.0, 1.028, 0.992, peak_bytes=2**29) | {"system": "weft auto"}
    others = [row(name, 0.5) for name in ("weft torch kernels", "weft over gloo")]  # beside them
    assert verdicts([row("ddp", 1.0), slower, faster, *others]) == [
        Verdict("gpt/data_parallel", LIMIT, "≤ 1.03", 1.028, True, around(1.028)),
        Verdict("gpt/data_parallel", "speed against ddp", "≥ 1.00", 0.992, False, around(0.992)),
        Verdict("gpt/data_parallel", MEMORY, "≤ 1.00", 0.5, True),
    ]


@pytest.mark.parametrize(
    ("interval", "disturbed", "held"),
    [
        ([1.00, 1.03], 0, True),
        ([1.00, 1.031], 0, None),
        ([1.031, 1.06], 0, False),
        (None, 0, None),
        ([1.00, 1.03], 2, None),
    ],
)
def test_a_verdict_needs_an_interval_that_decides(
    interval: list[float] | None, disturbed: int, held: bool | None
) -> None:
    own = weft(1.0, 1.02, 1.1) | {"limit_interval": interval, "disturbed": disturbed}
    time, speed, memory = verdicts([row("ddp", 1.0), own])
    assert time.held is held
    assert speed.held is (None if disturbed else True)
    assert memory.held
    assert judged(time)[-1] == {True: "", False: "missed", None: "undecided"}[held]
    ends = f" [{interval[0]:.3f}–{interval[1]:.3f}]" if interval else ""
    assert judged(time)[-2] == f"1.02{ends}"


@pytest.mark.parametrize(("peak", "held"), [(1.004, True), (1.006, False)])
def test_of_memory_two_decimals_count(peak: float, held: bool) -> None:
    *_, memory = verdicts([row("ddp", 1.0), weft(1.0, 1.0, 1.1, peak_bytes=peak * 2**30)])
    assert memory.held is held


def test_resident_memory_is_held_against_the_best_peers_where_it_was_measured() -> None:
    peer = row("ddp", 1.0, resident_bytes=2**30)
    *_, held = verdicts([peer, weft(1.0, 1.0, 1.1, resident_bytes=3 * 2**29)])
    assert held.what == "resident memory over that of ddp"
    assert (held.found, held.held) == (1.5, False)


def test_targets_of_links_and_of_overhead() -> None:
    slow = {"link": "1gbit"}
    found = verdicts([row("ddp", 1.0, **slow), weft(0.9, 2.0, 1.1, **slow)])
    name = "gpt/data_parallel/1gbit"
    assert found[0] == Verdict(name, "speed against ddp", "≥ 1.20", 1.1, False, around(1.1))
    alone = {"work": "lstm", "strategy": "single"}
    peers = [row("eager", 3.0, **alone), row("torch.compile", 1.0, **alone)]
    against = {"eager": 2.4, "torch.compile": 0.8}
    known = {name: {"ratio": x, "interval": around(x)} for name, x in against.items()}
    own = weft(1.25, 1.0, 0.8, **alone) | {"best_peer": "torch.compile", "against": known}
    found = verdicts([*peers, own])
    assert [each.found for each in found] == [2.4, 0.8, 1.0]
    assert [each.held for each in found] == [True, False, True]


def test_targets_of_peers_by_name() -> None:
    """Memory is bounded by what the target names, and not by the best peer besides."""
    place = {"work": "mixtral", "strategy": "expert"}
    peers = [row("ddp", 1.0, **place), row("fsdp2", 2.0, **place)]
    known = {"ddp": {"ratio": 1.01, "interval": around(1.01)}}
    own = weft(1.0, 1.0, 1.0, **place, peak_bytes=6 * 2**27, against=known)
    assert verdicts([*peers, own]) == [
        Verdict("mixtral/expert", "speed against ddp", "≥ 1.00", 1.01, True, around(1.01)),
        Verdict("mixtral/expert", MEMORY, "≤ 0.55", 0.75, False),
    ]


def test_pairs_of_more_ranks_are_judged_apart() -> None:
    peers = [row("ddp", 1.0), row("ddp", 1.0, ranks=4)]
    found = verdicts([*peers, weft(1.0, 1.0, 1.1), weft(1.0, 9.0, 0.9, ranks=4)])
    places = ["gpt/data_parallel"] * 3 + ["gpt/data_parallel/4ranks"] * 2
    assert [each.place for each in found] == places
    assert [each.held for each in found] == [True, True, True, False, True]


def test_every_pair_has_a_target_of_speed_against_a_peer_that_is_measured() -> None:
    for pair in PAIRS:
        target = target_of(pair.work, pair.strategy, pair.link, pair.ranks)
        assert target.against_peer or target.against, pair.name
        assert {*target.against, *target.memory} <= set(pair.systems), pair.name
        if target.over_limit:
            assert {"limit", "limit weft"} <= set(pair.systems), pair.name


def test_a_pair_that_did_not_run_misses() -> None:
    error = {"work": "gpt", "strategy": "zero3", "link": "host", "system": "all", "error": "why"}
    assert verdicts([error]) == [Verdict("gpt/zero3", "runs", "yes", None, False)]


def test_every_pair_has_weft_and_a_peer() -> None:
    names = [pair.name for pair in PAIRS]
    assert len(set(names)) == len(names)
    assert {*QUICK, *AUTO, *GLOO} <= set(names)
    for strategy, left_out in (*BEATEN.items(), *BEATEN_SLOWLY.items()):
        assert left_out < {each.name for each in SYSTEMS[strategy] if each.kind == "peer"}
    assert BEATEN_HERE.keys() < set(names)
    for pair in PAIRS:
        kinds = {each.name: each.kind for each in SYSTEMS[pair.strategy]}
        assert {kinds[name] for name in pair.systems} >= {"own", "peer"}
        assert ("weft auto" in pair.systems) == (pair.name in AUTO)
        assert ("weft over gloo" in pair.systems) == (pair.name in GLOO)


def test_the_time_left_follows_the_pace_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.__main__.time.perf_counter", lambda: now[0])
    clock = Clock(600.0, minutes=15.0)
    clock.next("first", 120.0)
    assert not clock.late
    now[0] = 240.0  # twice what was estimated
    assert clock.late
    clock.next("second", 60.0)
    assert capsys.readouterr().err == "first … 0 min, 10 left\nsecond … 4 min, 16 left\n"


def test_vector_instructions_are_trusted_where_a_trial_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(isa.TRUSTED, "")
    named = "avx512"
    monkeypatch.setattr(isa, "pick_vec_isa", lambda: named if config.cpp.vec_isa_ok else "avx2")
    isa.trust_vector_instructions()
    assert os.environ[isa.TRUSTED] == ""
    named = "avx2"
    isa.trust_vector_instructions()
    assert os.environ[isa.TRUSTED] == "1"


def test_new_rows_take_the_place_of_old_ones_of_the_same_pair() -> None:
    bert, old = row("ddp", 1.0, work="bert"), row("ddp", 1.0)
    slow, new = row("ddp", 2.0, link="1gbit"), row("weft", 2.0)
    assert merged([slow, bert, old], [new]) == [new, bert, slow]


def test_the_page_gets_new_results_between_its_marks() -> None:
    error = {
        "work": "mlp",
        "strategy": "single",
        "link": "host",
        "system": "x",
        "error": "a\nb | c",
    }
    machine = {"cores": 2, "processor": "x86_64", "torch": "2.13", "python": "3.11"}
    result = {
        "command": "python -m benchmarks",
        "machine": machine,
        "minutes": 20.4,
        "malloc": "kept",
        "loads": {"gpt/data_parallel": [Load(0.0, 0.0, 1.0).row(), Load(0.5, 0.0, 3.0).row()]},
        "rows": [weft(1.0, 1.0, 1.2), error],
    }
    text = page(f"before {BEGIN} old {END} after", result)
    assert text.startswith(f"before {BEGIN}\n\n`python -m benchmarks`, 20 minutes on 2 cores")
    assert text.endswith(f"{END} after")
    assert " old " not in text
    assert "allocator kept; 1 of 2 rounds were disturbed" in text
    cell = "1.00× limit weft [1.00–1.00] | 1.20× ddp [1.20–1.20]"
    line = f"| gpt | data_parallel | weft | 1000 (900–1100) | 6 | {cell} | 1.2 | 1024 |  | 1e-07 |"
    assert line in text
    assert "failed: a b \\| c" in text
    with pytest.raises(ValueError, match="must hold"):
        page("no marks", result)
    assert json.loads(raw(result)) == result
    rows: Any = result["rows"]
    assert raw(result).count("\n") > len(rows)
    assert all(len(cells(each)) == len(COLUMNS) for each in rows)
