"""Fits find the constants that made the rows, and errors are those of the rows."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.accuracy_collectives import (
    CALIBRATIONS,
    at_full_rate,
    fit,
    predicted,
    read,
    scores,
    table,
)
from benchmarks.fit_collectives import Point, fitted
from weft.hardware.topology_files import topology


def lines(seconds, ranks=(2, 4), gpu="v100"):
    sizes = [1 << power for power in range(20, 30)]
    return "gpu,ranks,bytes,time_us\n" + "".join(
        f"{gpu},{count},{size},{seconds(count, size) * 1e6}\n" for count in ranks for size in sizes
    )


def test_a_fit_finds_what_made_the_rows():
    points = []
    for ranks in (2, 4):
        for power in range(16, 31):
            size = 1 << power
            full = 2 * (ranks - 1) / ranks * size / 300e9
            hops = 2 * (ranks - 1)
            quick = 10e-6 + 1e-6 * hops + full / 0.5
            wide = 60e-6 + 2e-6 * hops + full / 0.9
            points.append(Point(ranks, size, min(quick, wide) + size / 600e9, full))
    found = fitted(points, ("quick", "wide"), own=True)
    assert found["own_gb_per_second"] == pytest.approx(600, rel=0.05)
    for name, share, hop in (("quick", 0.5, 1.0), ("wide", 0.9, 2.0)):
        assert found["protocols"][name]["share"] == pytest.approx(share, rel=0.05)
        assert found["protocols"][name]["hop_microseconds"] == pytest.approx(hop, rel=0.1)


def test_rows_are_read_fitted_and_scored(tmp_path):
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"gpu,ranks,bytes,time_us\nv100,2,1048576,70\nk80,2,8,1\n"))
    (row,) = read(path)
    assert (row.ranks, row.size, row.seconds) == (2, 1 << 20, 70e-6)
    assert at_full_rate(CALIBRATIONS["v100"], row) == pytest.approx((1 << 20) / 25e9)
    machine = topology("v100")
    (all_sizes, small) = scores([row], calibrated=True)
    assert (all_sizes.sizes, small.sizes, small.rows, small.judges) == ("all", "1-8 MB", 1, False)
    assert small.bias == pytest.approx(predicted(machine, row) / 70e-6 - 1)
    assert small.mean_error == small.median_error == abs(small.bias)
    assert "v100" in table([small])
    assert "(fitted)" in table([small])


def test_ranks_that_are_not_fitted_change_no_fit(tmp_path):
    paths = [tmp_path / "all.csv", tmp_path / "fitted.csv"]
    paths[0].write_text(lines(lambda ranks, size: 20e-6 * ranks + size / 20e9, (2, 4, 8)))
    paths[1].write_text(lines(lambda ranks, size: 20e-6 * ranks + size / 20e9, (2, 4)))
    some, others = (fit(read(path)) for path in paths)
    assert some == others
    assert set(some) == {"nvlink2"}
