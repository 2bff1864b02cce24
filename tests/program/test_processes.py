"""The final gate: the same training on real processes, through shared memory and over Gloo, on one host and several."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from benchmarks.links import LinksError, run, slow_links
from mixtures import for_both, word_batch
from models import (
    GPT,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
)
from on_ranks import passed
from program.live_models import eager_step, generated, norms

SCRIPT = Path(__file__).with_name("train_on_processes.py")


def on_one_device(make_model: Any, loss_fn: Any, make_batch: Any) -> dict[str, Any]:
    """Losses and last state; of language models also what eager code does with them afterwards."""
    torch.manual_seed(0)
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    losses = []
    for seed in range(3):
        loss = loss_fn(model, make_batch(4, seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = copy.deepcopy(model.state_dict())
    if make_model is not GPT:
        return {"losses": losses, "state": state}
    return {
        "losses": losses,
        "state": state,
        "states": norms(optimizer.state_dict()["state"]),
        "tokens": generated(model),
        "eager": eager_step(model, optimizer, make_batch(4, seed=3), token_loss),
        "last": eager_step(model, optimizer, make_batch(4, seed=4), token_loss),
    }


def with_dropout_on_one_rank() -> list[float]:
    torch.manual_seed(0)
    model = GPT(dropout=0.2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    program = weft.compile(
        model,
        token_loss,
        optimizer,
        token_batch(4),
        placement=weft.placement("cpu", [0]),
        seed=11,
    )
    return [program.step(token_batch(4, seed=seed)).item() for seed in range(3)]


def by_weft_run(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def by_forks(ranks: int, *arguments: str) -> None:
    passed(SCRIPT, ranks, *arguments)


def by_hosts(ranks: int, *arguments: str) -> None:
    """Each rank in a network of its own, as on several hosts: nothing is shared, all goes over Gloo."""
    # Nothing but the networks says that these are several hosts.
    found_out = ["env", "-u", "WEFT_TRANSPORT"]
    try:
        with slow_links(ranks, "10gbit") as links:
            assert run([*found_out, sys.executable, str(SCRIPT), *arguments], links) == 0
    except LinksError as error:
        pytest.skip(str(error))


def over_gloo(ranks: int, *arguments: str) -> None:
    passed(SCRIPT, ranks, *arguments, WEFT_TRANSPORT="gloo")


# A pipeline beside data and tensor parallelism on four ranks is in test_combinations.py.
ON_TWO = ("gpt data", "gpt tensor", "gpt stages", "experts")


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    ("ranks", "start", "names"),
    [
        (2, by_weft_run, ON_TWO),
        (4, by_forks, ("gpt tensor",)),
        (2, over_gloo, ("gpt stages", "gpt dropout", "resnet data", "experts")),
        pytest.param(4, by_forks, ("gpt dropout", "resnet data"), marks=pytest.mark.thorough),
        pytest.param(2, over_gloo, ON_TWO, marks=pytest.mark.thorough),
        pytest.param(2, by_hosts, ON_TWO, marks=pytest.mark.thorough),
    ],
)
def test_processes_equal_one_device(
    ranks: int, start: Callable[..., None], names: tuple[str, ...], tmp_path: Path
) -> None:
    start(ranks, str(tmp_path), *names)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(other == found[0] for other in found[1:])
    gpt, resnet = (GPT, token_loss, token_batch), (ResNet, classification_loss, image_batch)
    jobs = {"gpt data": gpt, "gpt tensor": gpt, "gpt stages": gpt, "resnet data": resnet}
    jobs["experts"] = (for_both, token_loss, word_batch)
    assert found[0].keys() == set(names)
    for name in jobs.keys() & found[0].keys():
        expected = on_one_device(*jobs[name])
        assert expected.keys() == found[0][name].keys()
        assert found[0][name]["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for one, other in zip(
            found[0][name].get("states", ()), expected.get("states", ()), strict=True
        ):
            assert one == pytest.approx(other, rel=1e-8)
        assert found[0][name].get("tokens") == expected.get("tokens")
        for key in {"eager", "last"} & found[0][name].keys():
            assert found[0][name][key] == pytest.approx(expected[key], rel=1e-10)
        for key, value in expected["state"].items():
            result = torch.tensor(found[0][name]["state"][key], dtype=value.dtype)
            torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-11)
    if "gpt dropout" in names:
        losses = with_dropout_on_one_rank()
        assert found[0]["gpt dropout"]["losses"] == pytest.approx(losses, rel=1e-10)
