"""A rank that ends before the others meet it is named to them at once, with the line at which they wait."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from on_ranks import run_ranks
from weft.errors import NoAnswer, RankFailure, UserError
from weft.runtime.world.rendezvous import await_all, connecting

SCRIPT = """
import os, sys
import torch
from torch import nn
import weft
from weft.runtime.world.rendezvous import report_exit_at_end

report_exit_at_end()
if "first" in sys.argv:
    torch.distributed.init_process_group("gloo")
if os.environ["RANK"] == "1":
    if "kill" in sys.argv:
        os.kill(os.getpid(), 9)
    sys.exit(0)
model = nn.Linear(4, 4)
weft.compile(model, lambda model, x: model(x).sum(), torch.optim.AdamW(model.parameters()), torch.ones(2, 4),
             placement=weft.placement("cpu", [0, 1]))
"""


def told(tmp_path: Path, *arguments: str, **variables: str) -> None:
    script = tmp_path / "early.py"
    script.write_text(SCRIPT)
    (output, code), (other, _) = run_ranks(script, 2, *arguments, seconds=30, **variables)
    assert code == 1, other
    assert "NoAnswer: rank 1 has ended before it came to weft.compile" in output
    assert f"rank 0 waits for it in {script}:16" in output


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["exit", "kill", "first"])
def test_a_rank_that_ends_before_compile_is_named(tmp_path: Path, how: str) -> None:
    told(tmp_path, how)


@pytest.mark.timeout(200)
def test_a_rank_that_ends_well_under_torchrun_is_named(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told(
        tmp_path,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def test_a_rank_that_has_come_may_end_and_one_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set("weft/came/1", "")
    await_all(store, 0, 2, lambda _: True, timedelta(seconds=5))
    with pytest.raises(RankFailure, match=r"rank 2 did not come within 0 s to weft\.compile"):
        await_all(store, 0, 3, lambda _: False, timedelta(0))


def test_ranks_that_wait_in_torch_for_an_entry_are_told_for_whom() -> None:
    """As Gloo does while a group is made; an error of another kind stays what it is."""
    store = HashStore()
    named = r"rank 0 did not connect with ranks \[1, 2\]: rank 2 has ended: \w+: Wait timeout"
    with pytest.raises(NoAnswer, match=named), connecting(0, range(3), lambda rank: rank == 2):
        store.wait(["1/cpu"], timedelta(milliseconds=1))
    unknown = r"one of \[1, 2\] has ended or did not answer"
    with pytest.raises(NoAnswer, match=unknown), connecting(0, range(3), lambda _: False):
        store.wait(["1/cpu"], timedelta(milliseconds=1))
    with pytest.raises(RuntimeError, match="no backend"), connecting(0, range(3), lambda _: True):
        raise RuntimeError("no backend")


def test_a_network_interface_that_is_down_is_named() -> None:
    down = "[enforce fail at device.cc:79] ifa != nullptr. Unable to find address for: lo"
    words = (
        r"rank 0: .*interface lo, which is down or not there: .*ip link set lo up.*GLOO_SOCKET_IF"
    )
    with pytest.raises(UserError, match=words), connecting(0, range(2), lambda _: False):
        raise RuntimeError(down)
