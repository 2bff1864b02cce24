"""`weft capture`: the job that is found, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft.cli.capture import find_job
from weft.cli.main import app
from weft.errors import UserError
from weft.planning.stored_step import StoredStep
from weft.program.planning.step import Job

JOB = """
import torch, weft
from torch import nn

def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch["x"])[0], batch["y"])

def job():
    with torch.device("meta"):
        model = nn.LSTM(4, 6, batch_first=True)
        batch = {"x": torch.empty(8, 5, 4), "y": torch.empty(8, 5, 6)}
    return weft.Job(model, loss_fn, torch.optim.AdamW(model.parameters()), batch)

def ints():
    return 3

def needs(path):
    return job()

def broken():
    import none_such
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the current folder, of its own for each test."""
    name = f"job_of_{request.node.name.partition('[')[0]}"
    (tmp_path / f"{name}.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["capture", *arguments], env={"COLUMNS": "300"})


def test_a_job_is_written(module: str) -> None:
    result = run(f"{module}:job", "-o", "a.graph")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("a.graph: LSTM, ")
    step = StoredStep.load("a.graph")
    assert (step.optimizers, step.device_type, step.precision.compute) == (("AdamW",), "cpu", None)
    assert "weight_ih_l0" in step.recurrent
    assert not step.apart


def test_precision_is_said(module: str) -> None:
    # The loss of the second is scaled.
    for precision in ("bf16", "fp16"):
        assert run(f"{module}:job", "-o", "a.graph", "--precision", precision).exit_code == 0
        assert StoredStep.load("a.graph").precision.compute == precision
    result = run(f"{module}:job", "-o", "a.graph", "--precision", "int8")
    assert (result.exit_code, "'int8'" in result.output) == (2, True)


def test_a_strategy_says_precision_and_pieces(module: str) -> None:
    Path("s.yaml").write_text(
        "weft_strategy: 1\nprecision: bf16\nparameters: {'*': S(0)}\nzero: {level: 1, axis: 0}\n"
    )
    assert run(f"{module}:job", "-o", "a.graph", "--strategy", "s.yaml").exit_code == 0
    step = StoredStep.load("a.graph")
    assert step.precision.compute == "bf16"
    assert step.apart == step.recurrent
    result = run(f"{module}:job", "-o", "a", "--strategy", "s.yaml", "--precision", "bf16")
    assert (result.exit_code, "leave --precision out" in result.output) == (2, True)


def test_a_job_may_stand_in_the_module_itself(module: str) -> None:
    Path(f"{module}.py").write_text(f"{JOB}\nmade = job()\n")
    assert isinstance(find_job(f"{module}:made"), Job)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{}", "must be module:function, such as my_job:job .*got"),
        ("{}:", "must be module:function"),
        ("{}:a.b", "must be module:function"),
        ("none_here:job", "there is no module 'none_here' in "),
        ("none.here:job", "there is no module 'none' in "),
        ("{}.py:job", r"such as my_job or package.my_job, got .*\.py'; leave .py"),
        ("jobs/{}:job", "got 'jobs/.*leave .py and folders out"),
        (".{}:job", "got '\\."),
        ("sys:path2", "sys has no 'path2'"),
        ("builtins:dict", r"gives an object of type dict, expected weft\.Job\("),
        ("{}:other", r"has no 'other'; expected a function .* weft\.Job\("),
        ("{}:ints", r"gives an object of type int, expected weft\.Job\("),
        ("{}:needs", r"must have no required arguments, but .*path"),
    ],
)
def test_what_is_no_job_is_told(module: str, target: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_job(target.format(module))


def test_the_users_own_errors_are_theirs(module: str) -> None:
    """From their own first line on, without the frames of the command."""
    Path(f"{module}.py").write_text(JOB + "\nnow()\n")
    result = run(f"{module}:job", "-o", "a.graph")
    assert result.exit_code == 2
    first, second, third = result.stderr.splitlines()[:3]
    assert first == f"error: {module} raised an error:"
    assert second == "Traceback (most recent call last):"
    assert f"{module}.py" in third
    assert "NameError" in result.stderr
    Path(f"{module}.py").write_text(JOB)
    with pytest.raises(UserError, match=r"(?s):broken raised an error:.*none_such") as caught:
        find_job(f"{module}:broken")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert str(caught.value).count('  File "') == 1


def test_errors_are_a_line_on_stderr(module: str) -> None:
    result = run(f"{module}:ints", "-o", "a.graph")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert run(f"{module}:job", "-o", "no/a.graph").stderr.startswith("error: cannot write")
