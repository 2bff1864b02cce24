"""The examples of the gallery train as plain PyTorch does, in both of their strategies; their notebooks run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from on_ranks import passed

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs" / "gallery.md"
RUN_ALL: Any = importlib.import_module("examples.run_all")
NOTEBOOKS: Any = importlib.import_module("examples.notebooks")
CASES = [
    (name, strategy)
    for name, strategies in RUN_ALL.STRATEGIES.items()
    for strategy in strategies
    if name != "gpt"  # has a test of its own
]
# Those whose models are of `transformers`.
OF_TRANSFORMERS = {"bert", "llama", "moe"}


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples find one another by their folder, as scripts do."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def example(name: str) -> Any:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers", reason="pip install -c constraints.txt -e '.[models]'")
    return importlib.import_module(f"examples.{name}")


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=map("-".join, CASES))
def test_the_first_steps_equal_plain_pytorch(
    name: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example(name)
    assert tuple(module.STRATEGIES) == RUN_ALL.STRATEGIES[name]
    module.main(["--strategy", strategy, "--steps", "2", "--check"])
    told = re.findall(
        r"^loss .* to .* in 2 steps, as plain PyTorch to (\S+);", capsys.readouterr().out, re.M
    )
    trainings = 2 if name in ("bert", "lora") else 1
    assert len(told) == trainings
    assert all(float(off) <= 1e-4 for off in told)


@pytest.mark.parametrize(("name", "strategy"), [("diffusion", "pipeline"), ("gan", "apart")])
def test_ranks_that_make_no_stages_are_told(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        example(name).main(["--strategy", strategy])
    assert f"--strategy {strategy} has 2 stages: start 2 ranks, found 3" in capsys.readouterr().err


def test_a_loss_that_differs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, gallery = example("vit"), importlib.import_module("gallery")
    plain = gallery.Plain.step
    monkeypatch.setattr(
        gallery.Plain, "step", lambda self, batch: [1.001 * each for each in plain(self, batch)]
    )
    with pytest.raises(SystemExit, match=r"step 0: loss .*, but .* in plain PyTorch"):
        vit.main(["--steps", "1", "--check"])


@pytest.mark.thorough
@pytest.mark.slow
def test_an_example_on_processes_writes_its_report(tmp_path: Path) -> None:
    report = tmp_path / "vit.html"
    words = ("--strategy", "tensor", "--steps", "2", "--check", "--report", str(report))
    first, second = passed(EXAMPLES / "vit.py", 2, *words)
    assert "as plain PyTorch" in first
    assert second == ""
    assert "ViT, training step by AdamW" in report.read_text()


def test_all_examples_are_run_and_shown() -> None:
    """By the program that runs them, and on their page, each with its strategies and its picture."""
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "Run(__doc__" in path.read_text()}
    assert {"gpt", *scripts} == set(RUN_ALL.STRATEGIES)
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(RUN_ALL.NOTEBOOKS)
    page = PAGE.read_text()
    for name, strategies in RUN_ALL.STRATEGIES.items():
        section = page.partition(f"\n`examples/{name}.py`: ")[2].partition("\n## ")[0]
        for strategy in strategies:
            assert f"`{strategy}`" in section, (name, strategy)
        (picture,) = re.findall(r"!\[[^\]]+\]\((.+?)\)", section)
        assert 0 < (PAGE.parent / picture).stat().st_size <= 60_000
    assert all(f"examples/{name}.ipynb" in page for name in RUN_ALL.NOTEBOOKS)


def test_a_run_that_fails_is_told() -> None:
    output, well = RUN_ALL.run(["-c", "print('found nothing'); raise SystemExit(3)"])
    assert (output, well) == ("found nothing", False)
    assert RUN_ALL.run(["-c", "print('loss 1.0')"]) == ("loss 1.0", True)
    assert RUN_ALL.told("begin\nloss 3\nloss 2\n5 right") == "loss 2; 5 right"


def test_first_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = NOTEBOOKS.run_cells(EXAMPLES / "first_steps.ipynb")
    assert names["losses"][-1] < names["losses"][0] / 2
    assert type(names["model"][4].weight) is torch.nn.Parameter
    assert "sent by a rank" in capsys.readouterr().out


@pytest.mark.thorough
def test_strategies_give_one_loss(capsys: pytest.CaptureFixture[str]) -> None:
    NOTEBOOKS.run_cells(EXAMPLES / "strategies.ipynb")
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 4
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * 4
    assert out.count("ms a step") == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_ALL.NOTEBOOKS)
def test_notebooks_run_in_a_kernel(name: str) -> None:
    for needed in ("nbclient", "ipykernel"):
        pytest.importorskip(needed, reason=f"pip install {needed}")
    NOTEBOOKS.run_in_kernel(EXAMPLES / f"{name}.ipynb")
