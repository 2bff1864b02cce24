"""Copies on other hosts, which are folders here: what goes on when hosts are lost, on the same ranks and on others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from on_ranks import run_ranks

SCRIPT = Path(__file__).with_name("snapshots_on_processes.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of three ranks on three hosts that was lost after its fourth step, and what its ranks told."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, _ran(folder, "train", folder / "roots", "012")


def _ran(folder: Path, mode: str, roots: Path, hosts: str, **variables: str) -> list[Any]:
    out = roots.with_name(f"{roots.name}-out")
    for each in (roots, out):
        each.mkdir(exist_ok=True)
    paths = (str(folder / "kept"), str(roots), hosts, str(out))
    ended = run_ranks(SCRIPT, len(hosts), mode, *paths, **variables)
    assert [code for _, code in ended] == [0] * len(hosts), ended[0][0][-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(len(hosts))]


def _left(trained: Path, tmp_path: Path, lost: Iterable[int]) -> Path:
    """The memory of the hosts that are left."""
    roots = tmp_path / "roots"
    shutil.copytree(trained / "roots", roots)
    for host in lost:
        shutil.rmtree(roots / f"host-{host}")
    return roots


@pytest.mark.parametrize(
    ("lost", "hosts", "variables"),
    [
        ((1,), "012", {}),
        pytest.param((2,), "012", {"WEFT_TRANSPORT": "gloo"}, marks=pytest.mark.thorough),
    ],
)
def test_after_the_loss_of_a_host_the_run_has_the_same_bits(
    lost: tuple[int, ...],
    hosts: str,
    variables: dict[str, str],
    trained: tuple[Path, list[Any]],
    tmp_path: Path,
) -> None:
    """What is damaged on a host that is left comes from its buddy's."""
    folder, before = trained
    left, harmed = _left(folder, tmp_path, lost), min({0, 2} - {*lost, lost[0] - 1})
    shards = list((left / f"host-{harmed}").rglob(f"rank-{harmed:05d}/shard-*"))
    for shard in shards:
        with shard.open("r+b") as opened:
            opened.seek(-3, os.SEEK_END)
            opened.write(b"?!?")
    after = _ran(folder, "resume", left, hosts, **variables)
    for rank, ((began, found, losses, _, _), first) in enumerate(zip(after, before, strict=True)):
        assert (began, found) == (4, {"rank": rank, "drawn": 10 * rank, "step": 4})
        assert losses == first[2]
    assert after[0][3]
    for told in after[0][3]:  # it may have been sent on before it was checked
        assert f"{shards[0].name} (" in told
        assert told.endswith("a copy of it is looked for on other hosts")


def test_fewer_ranks_read_what_is_left(tmp_path: Path) -> None:
    """Ranks 0 and 1 go on where ranks 0 and 2 were; what rank 1 had comes from its copy."""
    folder = tmp_path / "trained"
    folder.mkdir()
    before = _ran(folder, "alike", folder / "roots", "012")
    for began, _, losses, told, _ in _ran(folder, "resume", _left(folder, tmp_path, (1,)), "02"):
        assert (began, told) == (4, [])
        assert losses == pytest.approx(before[0][2], rel=1e-9)


def test_a_host_that_is_lost_with_its_buddy_s_is_told_and_the_disk_is_read(
    trained: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder, before = trained
    left = _left(folder, tmp_path, (1, 2))
    after = _ran(folder, "resume", left, "012")
    for rank, (began, found, losses, told, _) in enumerate(after):
        assert (began, found) == (3, {"rank": rank, "drawn": 10 * rank, "step": 3})
        assert losses == before[0][2]
        assert "the snapshot of step 4 in memory lacks the parts of ranks [1]: " in told[0]
    # The run has snapshots again, on all hosts, and none of before.
    for host in range(3):
        assert len(list((left / f"host-{host}").rglob("record.json"))) == 2
        assert not list((left / f"host-{host}").rglob("start-00001"))


def test_each_rank_sends_what_it_saves_to_its_buddy_alone(trained: tuple[Path, list[Any]]) -> None:
    folder, before = trained
    for rank, (*_, sent) in enumerate(before):
        place = folder / "roots" / f"host-{rank}"
        own = [x for x in place.rglob(f"rank-{rank:05d}/*") if x.suffix == ".safetensors"]
        every = (x for x in place.rglob(f"rank-{rank:05d}/*") if x.is_file())
        there = sum(path.stat().st_size for path in every)
        # Two generations are there of three that were taken: that of step 3 is on the disk.
        assert sent["exchange"] == pytest.approx(there * 1.5, rel=0.05)
        copy = next((folder / "roots" / f"host-{(rank + 1) % 3}").rglob(f"rank-{rank:05d}"))
        for path in own:
            assert (
                copy.parents[1] / path.relative_to(path.parents[2])
            ).read_bytes() == path.read_bytes()
