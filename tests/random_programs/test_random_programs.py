"""Some fixed random programs under random strategies, and what the tool that draws them must find itself."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tools.random_programs.__main__ import Judge
from tools.random_programs.blocks import BLOCKS
from tools.random_programs.cases import BASES, Case, draw
from tools.random_programs.changes import CHANGES
from tools.random_programs.judge import Verdict, judge
from tools.random_programs.rounding import Rounded
from tools.random_programs.shrink import shrink
from tools.random_programs.text import case_text, namespace

pytestmark = pytest.mark.usefixtures("double_precision")

# Together they hold nearly every block, all kinds of layouts and features of strategies, and all changes;
# `python -m tools.random_programs` runs thousands.
SEEDS = (
    *(100000, 100008, 100009, 100010, 100013, 100016, 100019, 100023, 100024),
    *(100026, 100029, 100030, 100031, 100032, 100041, 100044, 100045, 100049),
    *(100051, 100053, 100060, 100061, 100064, 100067, 100068, 100070, 100073),
    *(100087, 200002, 200022, 200024, 200037, 200043, 200044, 200045, 200062),
    *(200066, 200072, 200081, 200086, 200088),
)
SCRIPT = """
import time
import torch
import weft
from torch import nn

torch.set_default_dtype(torch.float64)

def make_model():
    torch.manual_seed(0)
    return nn.Linear(4, 4)

def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def loss_fn(model, batch):
    return {"loss": model(batch["x"]).square().mean() * FACTOR(batch["x"])}

def make_batch(seed, n):
    return {"x": torch.ones(n, 4) * (seed + 1)}

STEPS, GRID, LIMIT = [(4, True, 1.0, "")] * 2, [0, 1], 1e-9
RANDOM = EVALUATES = METRICS = False
STRATEGY = weft.data_parallel()
"""


def verdict_of(factor: str, grid: str = "[0, 1]") -> Verdict:
    text = f"{SCRIPT}\nFACTOR = {factor}\nGRID = {grid}\n"
    return judge(namespace(text, "<script>"))


@pytest.mark.parametrize("seed", SEEDS)
def test_it_trains_as_plain_pytorch(seed: int) -> None:
    verdict = judge(namespace(case_text(draw(seed)), f"<program {seed}>"))
    assert verdict.kind == "right", verdict


def test_the_seeds_are_various() -> None:
    cases = [draw(seed) for seed in SEEDS]
    assert {case.base for case in cases} == set(BASES)
    assert len({name for case in cases for _, name in case.blocks}) > 0.85 * len(BLOCKS)
    features = {name for case in cases for name in case.features}
    assert {"zero", "micro", "recompute", "stages", "own stages", "clip", "bf16"} <= features
    assert {case.ranks for case in cases} >= {2, 3, 4, 5, 6, 8}
    assert {step.change for case in cases for step in case.steps} == {"", *CHANGES}


def test_a_seed_is_always_the_same_program() -> None:
    assert case_text(draw(7)) == case_text(draw(7))
    assert case_text(draw(7)) != case_text(draw(8))


def test_verdicts() -> None:
    """A factor that differs while a step is captured is a wrong result; the others end in errors."""
    fake = "hasattr(x, 'fake_mode')"
    assert verdict_of("lambda x: 2.0").kind == "right"
    assert verdict_of(f"lambda x: 2.0 if {fake} else 1.0").kind == "wrong"
    assert verdict_of("lambda x: 2.0 if x.sum() > 0 else 1.0").kind == "refused"
    assert verdict_of(f"lambda x: {{}}['missing'] if {fake} else 1.0").kind == "refused"
    assert verdict_of("lambda x: {}['missing']").kind == "invalid"
    assert verdict_of("lambda x: 2.0", grid="'no grid'").kind == "internal"


@pytest.mark.thorough
def test_a_case_that_hangs_ends() -> None:
    judges = Judge(limit=3.0)
    try:
        hung = judges(f"{SCRIPT}\nFACTOR = lambda x: time.sleep(60)", "<hangs>")
        assert hung.kind == "hang"
        died = judges(f"{SCRIPT}\nFACTOR = lambda x: __import__('os')._exit(3)", "<dies>")
        assert "exit code 3" in died.why
    finally:
        judges.stop()


def test_roundings_are_of_sums_alone() -> None:
    """Rows that are equal differ where they are added up, and nowhere else."""
    x = torch.full((6, 3), 0.1)
    with Rounded(0):
        assert (x.std(0, unbiased=False) > 0).all()
        assert torch.equal(x[torch.arange(5)] * 2.0, x[:5] * 2.0)
        assert x.argmax(0).tolist() == [0, 0, 0]
        assert 0 < (x.mean(0) - 0.1).abs().max() < 1e-15
    assert (x.std(0, unbiased=False) == 0).all()


def test_roundings_lose_nothing_that_is_written() -> None:
    """A BatchNorm writes to its running statistics; its batch is rounded, these are not lost."""
    norm = torch.nn.BatchNorm1d(3)
    x = torch.arange(12.0).reshape(4, 3).sin() + 2
    for seed in range(2):
        with Rounded(seed):
            norm(x)
    expected = copy.deepcopy(norm)
    expected.reset_running_stats()
    for _ in range(2):
        expected(x)
    torch.testing.assert_close(norm.state_dict(), expected.state_dict(), rtol=1e-14, atol=0)


def test_failing_cases_become_simple() -> None:
    seed = next(seed for seed in range(99) if len(draw(seed).blocks) > 3)
    case = draw(seed)
    wanted = case.blocks[1]

    def judged(each: Case) -> Verdict:
        return Verdict("wrong" if wanted in each.blocks else "right")

    found, verdict = shrink(case, Verdict("wrong"), judged)
    assert verdict.kind == "wrong"
    assert found.blocks == (wanted,)
    assert (found.features, len(found.steps)) == ((), 1)
    assert found.base in ("data", "free")


def test_taking_a_block_away_leaves_the_others() -> None:
    case = replace(draw(0), start="rows", shape=(6,), blocks=((0, "dropout"), (1, "mlp")))
    alone = replace(case, blocks=case.blocks[1:])
    assert dict(case.written())["b1"] == dict(alone.written())["b1"]
