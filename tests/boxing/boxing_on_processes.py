"""What each of 4 processes runs for test_boxing_processes.py, told the first recorded case and the step to the next."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from boxing_runs import (
    EVERYONE,
    channels_by_ranks,
    check_gathered,
    check_recorded,
    check_reductions,
    communicators,
)
from boxing_values import recorded_cases
from two_placements import check_two_placements
from weft.runtime.world.distributed import DistributedWorld


def main(first: int, step: int) -> None:
    world = DistributedWorld("cpu", timeout=60)
    cases = recorded_cases()[first::step]
    groups = communicators(cases)
    channel_of = channels_by_ranks(groups, world.connect(groups)[world.rank])
    sent = [check_recorded(world.rank, case, channel_of) for case in cases]
    every = channel_of(EVERYONE).exchange_text(json.dumps(sent))
    check_gathered([json.loads(text) for text in every], cases)
    for dtype in ("bool", "int32", "bfloat16"):
        check_reductions(world.rank, dtype, channel_of, shapes=((3, 5), (0, 2)))
    check_two_placements(world)
    world.close()
    sys.stdout.write(f"rank {world.rank} checked {len(cases)} cases\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
