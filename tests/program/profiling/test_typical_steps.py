"""General steps, and the roofline that their calls show."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.hardware.measured_costs import Measurements, Sample
from weft.layout import Placement
from weft.ops import flops, traffic
from weft.planning.plans import plan_stored
from weft.program.profiling import typical_steps
from weft.program.profiling.typical_steps import general_steps, measured_job, roofline
from weft.runtime.profiling.call_times import calls_in_order
from weft.units import Seconds


def test_the_roofline_is_that_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typical_steps, "_DECODERS", ((64, 2, 128, 64, 256),))
    monkeypatch.setattr(typical_steps, "_IMAGES", ())
    ranks = Placement("cpu", (2,), (0, 1))
    compiled = [plan_stored(step, weft.data_parallel(), ranks, (0,)) for step in general_steps(2)]
    every = list(dict.fromkeys(calls_in_order(each for c in compiled for each in c.programs)))
    names = {one.call.op for one in every}
    assert {"aten.mm.default", "aten.embedding.default", "aten.gelu.default"} <= names
    calls = {}
    for one in every:
        try:
            seconds = max(1e-6, flops(one.call) / 1e10, traffic(one.call) / 1e9)
        except weft.errors.RuleError:
            continue
        calls[one.text] = Sample(Seconds(seconds))
    found = roofline(compiled, Measurements({}, calls))
    assert found is not None
    assert found.traffic == pytest.approx(1e9)
    assert 1e9 < found.flops <= 1e10 * 1.001
    assert found.start < 1e-5
    assert roofline(compiled, Measurements({})) is None


def test_a_job_is_measured_without_being_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noting(world, compiled, optimizers, begun=None):
        seen.append((len(compiled[0].programs), [type(each) for each in optimizers.each]))
        return Measurements({})

    monkeypatch.setattr(typical_steps, "measured_costs", noting)
    with torch.device("meta"):
        model, batch = torch.nn.Linear(4, 4), torch.zeros(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = weft.Job(model, lambda m, x: m(x).sum(), optimizer, batch)
    with weft.local_world(2) as world:
        measured_job(world, job)
    assert seen == [(len(world.ranks), [torch.optim.SGD])]
