"""Folders of code that another user may write to: refused, and named."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from strangers import needs_root, run_as_stranger
from weft import private
from weft.errors import UserError
from weft.runtime.compiled import choice as kernel_choice
from weft.runtime.compiled import inductor
from weft.runtime.compiled.inductor import cache_folder, read_code, write_text

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users as of POSIX")

# A stranger makes a folder and puts a file into it.
PLANT = (
    "import sys\nos.makedirs(sys.argv[1], exist_ok=True)\nopen(sys.argv[1] + '/x.so', 'w').close()"
)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody may write to, named as the cache."""
    folder = Path(tempfile.mkdtemp()).resolve()
    folder.chmod(0o777)
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    yield folder
    shutil.rmtree(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_root
def test_nothing_is_loaded_from_a_folder_that_a_stranger_made(shared: Path) -> None:
    run_as_stranger(PLANT, str(shared / "inductor"))
    with pytest.raises(UserError, match=f"others may write to {shared} .*chmod go-w {shared}"):
        inductor.load("def call(inputs):\n    return inputs\n")
    shared.chmod(0o755)
    theirs = f"{shared}/inductor belongs to another user \\(65534\\): set WEFT_CACHE to a folder"
    with pytest.raises(UserError, match=theirs):
        inductor.load("def call(inputs):\n    return inputs\n")


@needs_root
def test_what_a_stranger_left_in_a_folder_of_ours_is_refused(shared: Path) -> None:
    ours = shared / "inductor"
    ours.mkdir(mode=0o777)
    ours.chmod(0o777)
    run_as_stranger(PLANT, str(ours / "ab"))
    shared.chmod(0o755)
    ours.chmod(0o700)
    with pytest.raises(UserError, match=f"may have written {ours}/ab: delete {ours}"):
        cache_folder("inductor")
    shutil.rmtree(ours)
    assert cache_folder("inductor") == ours
    assert mode(ours) == 0o700


@needs_root
def test_a_link_of_a_stranger_leads_nowhere(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_stranger(PLANT, str(shared / "theirs"))
    run_as_stranger("import sys\nos.symlink(*sys.argv[1:])", "theirs", str(shared / "link"))
    monkeypatch.setenv("WEFT_CACHE", str(shared / "link"))
    for opened in (0o777, 0o1777):
        shared.chmod(opened)
        with pytest.raises(UserError, match=f"{shared}"):
            cache_folder("kernels")
    assert list((shared / "theirs").iterdir()) == [shared / "theirs" / "x.so"]


def test_a_folder_in_one_that_others_may_write_to_can_be_exchanged(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless each can only move what is his own there, as in /tmp."""
    ours = shared / "ours"
    ours.mkdir(mode=0o700)
    monkeypatch.setenv("WEFT_CACHE", str(ours))
    with pytest.raises(UserError, match=f"others may write to {shared} \\(mode 777\\)"):
        cache_folder("kernels")
    shared.chmod(0o1777)
    assert cache_folder("kernels") == ours / "kernels"
    ours.chmod(0o1777)
    with pytest.raises(UserError, match=f"others may write to {ours} \\(mode 1777\\): set"):
        cache_folder("kernels")


def test_what_others_may_write_below_an_open_folder_is_refused_and_the_folder_closed(
    shared: Path,
) -> None:
    shared.chmod(0o755)
    ours = shared / "inductor"
    (ours / "ab").mkdir(parents=True)
    ours.chmod(0o755)
    (ours / "ab").chmod(0o777)
    with pytest.raises(UserError, match=f"may have written {ours}/ab"):
        cache_folder("inductor")
    (ours / "ab").chmod(0o755)
    cache_folder("inductor")
    assert mode(ours) == 0o700


def test_a_compile_tells_before_it_begins(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "missing_compiler", lambda _: None)
    with pytest.raises(UserError, match=f"others may write to {shared}"):
        kernel_choice.usable_kernels("auto", "cpu")
    assert kernel_choice.usable_kernels("aten", "cpu") == "aten"


def test_without_a_folder_of_its_own_the_usual_cache_moves(
    shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WEFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spare = tmp_path / f"weft-{os.geteuid()}"
    with pytest.warns(UserWarning, match=f"others may write to {shared}.* kept in {spare}"):
        assert cache_folder("kernels") == spare / "kernels"
    assert not (shared / "weft").exists()
    shared.chmod(0o700)
    assert cache_folder("kernels") == shared / "weft" / "kernels"
    assert mode(shared / "weft") == 0o700


def test_a_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="file is not a folder: set WEFT_CACHE to"):
        cache_folder("kernels")
    (tmp_path / "circle").symlink_to("circle")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "circle"))
    with pytest.raises(UserError, match="circle .*: set WEFT_CACHE to"):
        cache_folder("kernels")


def test_a_group_of_this_user_alone_is_no_other(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems make one for each user, and new folders are for that group to write."""
    shared.chmod(0o775)
    monkeypatch.setattr(private, "_is_own_group", lambda _: False)
    with pytest.raises(UserError, match="mode 775"):
        cache_folder("kernels")
    monkeypatch.setattr(private, "_is_own_group", lambda _: True)
    assert cache_folder("kernels") == shared / "kernels"


@pytest.mark.parametrize(
    ("group", "name", "members", "own"),
    [
        (7, "ann", ["ann"], True),
        (7, "ann", [], True),
        (7, "ann", ["ann", "bob"], False),
        (7, "users", [], False),
        (0, "ann", [], False),
    ],
)
def test_whose_a_group_is(
    monkeypatch: pytest.MonkeyPatch, group: int, name: str, members: list[str], own: bool
) -> None:
    found = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="ann"))
    monkeypatch.setattr(grp, "getgrgid", lambda _: found)
    assert private._is_own_group.__wrapped__(group) == own


def test_what_is_kept_is_this_user_s_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_text(tmp_path / "code.py", "x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "code.py") == 0o600
    assert read_code(tmp_path / "code.py") == "x"
    (tmp_path / "code.py").chmod(0o602)
    assert read_code(tmp_path / "code.py") is None


def test_a_check_inside_is_made_once_for_each_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It looks at every file; what was closed stays so."""
    seen: list[Path] = []
    monkeypatch.setattr(inductor, "close_private", lambda folder, _: seen.append(folder))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    for name in ("kernels", "inductor", "kernels"):
        cache_folder(name)
    assert seen == [tmp_path / "kernels", tmp_path / "inductor"]
