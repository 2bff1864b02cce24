"""The scripts of docs/coming_from.md: what is trained with weft is what the peer's script trains.

DeepSpeed and Megatron run on GPUs only; the scripts that replace them are compared with plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from on_ranks import passed

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
BLOCK = re.compile(r"```python\n(# (\w+)\.py: .*?)```", re.DOTALL)
SCRIPTS = {name: text for text, name in BLOCK.findall(PAGE.read_text())}
NORM = re.compile(r"norm ([\d.]+)(?:, (\d+) right)?")


def by_weft_run(script: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "weft", "run", "-n", "2", str(script)],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


# Ends a peer's process where its script ends: DDP's own end hangs in a forked process, once in some hundred runs.
END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def by_forks(script: Path) -> str:
    script.write_text(script.read_text() + END)
    return "".join(passed(script, 2, folder=script.parent))


def run(name: str, folder: Path) -> tuple[list[tuple[float, int]], dict[str, Any]]:
    """Norm and right answers of each epoch as two processes print them, and what they save."""
    script = folder / f"{name}.py"
    script.write_text(SCRIPTS[name])
    output = (by_weft_run if name.endswith("_weft") else by_forks)(script)
    lines = [(float(norm), int(right or 0)) for norm, right in NORM.findall(output)]
    assert len(lines) == 3, "one line for each epoch, from one rank"
    return lines, torch.load(folder / f"{name}.pt", weights_only=True)


def assert_alike(found: tuple[list[tuple[float, int]], Any], expected: Any) -> None:
    lines, saved = found
    assert lines == [(pytest.approx(norm, abs=2e-5), right) for norm, right in expected[0]]
    torch.testing.assert_close(saved, expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(300)
def test_a_script_with_ddp(tmp_path: Path) -> None:
    assert_alike(run("ddp_weft", tmp_path), run("ddp", tmp_path))


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_script_with_fsdp2(tmp_path: Path) -> None:
    lines, saved = run("fsdp2_weft", tmp_path)
    expected, theirs = run("fsdp2", tmp_path)
    names = theirs["optimizer"]["param_groups"][0]["params"]
    assert_alike((lines, saved["model"]), (expected, theirs["model"]))
    states = {names[number]: states for number, states in saved["optimizer"]["state"].items()}
    torch.testing.assert_close(states, theirs["optimizer"]["state"], rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_script_with_accelerate(tmp_path: Path) -> None:
    found = run("accelerated_weft", tmp_path)
    assert_alike(found, by_one_process())
    if importlib.util.find_spec("accelerate"):
        assert_alike(found, run("accelerated", tmp_path))


def test_a_script_with_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "deepspeed_weft.py"
    script.write_text(SCRIPTS["deepspeed_weft"])
    printed = NORM.findall("".join(passed(script, 2, folder=tmp_path)))
    saved = torch.load(tmp_path / "deepspeed_weft.pt", weights_only=True)
    assert_alike(([(float(norm), int(right)) for norm, right in printed], saved), by_one_process())
    assert (tmp_path / "deepspeed_weft" / "weft.json").is_file()


@pytest.mark.thorough
def test_a_script_with_megatron(tmp_path: Path) -> None:
    """Two stages of two ranks; what stands before the strategy is plain PyTorch."""
    script = tmp_path / "megatron_weft.py"
    script.write_text(SCRIPTS["megatron_weft"])
    printed = "".join(passed(script, 4, folder=tmp_path))
    found = [float(each) for each in re.findall(r"(?:loss|norm) ([\d.]+)", printed)]
    plain: dict[str, Any] = {}
    exec(SCRIPTS["megatron_weft"].partition("strategy = ")[0], plain)
    expected = []
    for batch in plain["tokens"]:
        loss = plain["loss_fn"](plain["model"], batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain["model"].parameters(), 1.0)
        plain["optimizer"].step()
        plain["optimizer"].zero_grad()
        expected += [loss.item(), norm.item()]
    assert found == pytest.approx(expected, abs=1e-4)
    saved = torch.load(tmp_path / "megatron_weft.pt", weights_only=True)
    weights = plain["model"].state_dict()
    assert saved.keys() == weights.keys()
    # Gradients of key biases are zero but for rounding, which Adam divides by itself.
    names = [name for name in saved if not name.endswith("qkv.bias")]
    found_weights, expected_weights = ({n: each[n] for n in names} for each in (saved, weights))
    # An update moves weights by some 1e-2.
    torch.testing.assert_close(found_weights, expected_weights, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_python(name: str) -> None:
    """Those of peers that are not here too."""
    compile(SCRIPTS[name], name, "exec")


def by_one_process() -> tuple[list[tuple[float, int]], dict[str, Any]]:
    """What the scripts with Accelerate and its successor do, in plain PyTorch."""
    torch.manual_seed(0)
    x = torch.randn(96, 16)
    y = x[:, :4].argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    lines = []
    for _ in range(3):
        for begin in (0, 32):
            rows = slice(begin, begin + 32)
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        right = (model(x[64:]).argmax(1) == y[64:]).sum()
        lines.append((norm.item(), int(right)))
    return lines, dict(model.state_dict())
