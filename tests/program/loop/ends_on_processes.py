"""Two ranks, one of which does not come to a step: the other gives up, both end their world and meet in a new one.

One of them has failed before that to meet somebody in a world on the way.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import weft
from weft.errors import NoAnswer
from weft.program.loop.elastic import end_old_world
from weft.runtime.failures.board import PeerFailure
from weft.runtime.world import distributed
from weft.runtime.world.distributed import current_world, give_up
from weft.runtime.world.meeting import meet_again
from weft.runtime.world.variables import MEETING
from weft.tensor.mesh import _meshes

RANK, SIGN = int(os.environ["RANK"]), Path("given_up")


def trained() -> tuple[weft.Program, float]:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    program = weft.compile(
        *(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), x),
        placement=weft.placement("cpu", [0, 1]),
        strategy=weft.Strategy(batch={"*": weft.split(0)}),
    )
    return program, float(program.step(x))


def wait_in_vain(program: weft.Program) -> None:
    """Rank 0 is in a step to which the other one does not come."""
    threading.Timer(0.05, give_up, ["rank 1 is lost"]).start()
    with pytest.raises(PeerFailure, match="rank 1 is lost"):
        program.step(torch.ones(4, 4))
    with pytest.raises(PeerFailure, match="rank 1 is lost"):
        current_world().gather({0: "x"})
    SIGN.touch()


def meet_in_vain() -> None:
    """Rank 0 comes to a world in which the other one, which is another process there, has ended before."""
    meeting = os.environ[MEETING]
    os.environ[MEETING] += "-0"
    Path(f"{os.environ[MEETING]}.rank1").touch()  # nobody holds it
    meet_again()
    with pytest.raises(NoAnswer, match="rank 1 has ended before it came"):
        current_world()
    assert end_old_world() == ""
    os.environ[MEETING] = meeting


def meet_in_part() -> None:
    """Both come, and hear that the other one is lost before they say on which host they are."""
    os.environ[MEETING] += "-2"
    meet_again()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "host", lambda: give_up("one is lost") or "")
        with pytest.raises(PeerFailure, match="one is lost"):
            current_world()
    # No thread of the world that was never made is left.
    assert end_old_world() == ""


if __name__ == "__main__":
    program, first = trained()
    if RANK == 0:
        wait_in_vain(program)
    while not SIGN.exists():
        os.sched_yield()
    before = current_world()
    assert end_old_world() == ""
    assert before.ended
    assert not any(world is not None for world, *_ in _meshes)
    assert not torch.distributed.is_initialized()
    assert not [each for each in threading.enumerate() if each.name.startswith("weft ")]
    if RANK == 0:
        meet_in_vain()
    meet_in_part()
    os.environ[MEETING] += "-1"
    os.environ["RANK"] = str(1 - RANK)
    meet_again()
    program, again = trained()
    assert again == first
    assert current_world().ranks == (1 - RANK,)
    program.close()
