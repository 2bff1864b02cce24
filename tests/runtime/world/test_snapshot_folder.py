"""The folder of a run in memory: whose it is, how long it is there, and what becomes of those that were left."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from weft.runtime.world.snapshot_folder import snapshot_folder

VARIABLE = "WEFT_SNAPSHOTS"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("how", ["well", "raises", "exits"])
def test_it_is_for_this_user_alone_and_goes_with_the_run(how: str, tmp_path: Path) -> None:
    ends = {"well": None, "raises": KeyboardInterrupt(), "exits": SystemExit(1)}
    try:
        with snapshot_folder(tmp_path):
            folder = Path(os.environ[VARIABLE])
            assert folder.parent == tmp_path
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (folder / "part").mkdir()
            (folder / "part" / "file").write_text("x")
            if (error := ends[how]) is not None:
                raise error
    except (KeyboardInterrupt, SystemExit):
        assert how != "well"
    assert VARIABLE not in os.environ
    assert not list(tmp_path.iterdir())


def test_what_a_killed_launcher_has_left_goes_and_what_another_one_uses_stays(
    tmp_path: Path,
) -> None:
    used, left = tmp_path / "weft-snapshots-used", tmp_path / "weft-snapshots-left"
    for each in (used, left):
        each.mkdir()
        (each / "launcher.lock").write_text("")
    halfway = tmp_path / "weft-snapshots-halfway"  # who took it away was killed
    halfway.mkdir()
    others = tmp_path / "something-else"
    others.mkdir()
    with (used / "launcher.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with snapshot_folder(tmp_path):
            assert used.exists()
            assert not left.exists()
            assert not halfway.exists()
            own = Path(os.environ[VARIABLE])
            with snapshot_folder(tmp_path):  # the user's choice, for who is started by a rank
                assert Path(os.environ[VARIABLE]) == own
            assert own.exists()
    assert sorted(tmp_path.iterdir()) == [others, used]


def test_without_a_place_there_is_none(tmp_path: Path) -> None:
    with snapshot_folder(tmp_path / "nothing"):
        assert VARIABLE not in os.environ
