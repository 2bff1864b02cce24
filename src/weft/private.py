"""Folders that nobody but this user can write to, so that what is in them can be run and trusted.

If nobody else can write to a folder, nor to one above it, nobody can exchange it between the
moment when it is checked and the moment when it is used.
"""

from __future__ import annotations

import os
import stat
import sys
from functools import cache
from pathlib import Path

from weft.errors import UserError

# Without users as POSIX knows them, nothing is checked.
_POSIX = sys.platform != "win32"
if _POSIX:
    import grp
    import pwd


def make_private(folder: Path, instead: str) -> Path:
    """Make a folder, and what is missing above it, for this user alone, and check what was there.

    The folder must be this user's, with nobody else allowed to write. Folders above may be root's
    too, and such as /tmp, where everybody may write but exchange only what is his own.

    Args:
        folder: may contain symbolic links.
        instead: what the user can do where the folder cannot be used, for the error.

    Returns:
        the folder without symbolic links.

    Raises:
        UserError: names the folder that others may write to, and what would work.
    """
    try:
        real = folder.resolve()
        for one in (*reversed(real.parents), real):
            if not os.path.lexists(one):
                one.mkdir(mode=0o700, exist_ok=True)
            check_private(one, instead, above=one != real)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that go in a cycle
        raise UserError(f"{folder} cannot be made ({error}): {instead}") from error
    return real


def check_private(folder: Path, instead: str, *, above: bool = False) -> None:
    """Check that nobody else can write to a folder.

    Args:
        folder: not a symbolic link.
        instead: as for `make_private`.
        above: true if it only is above the folder that matters.

    Raises:
        UserError: as `make_private`.
    """
    found = folder.lstat()
    sticky = found.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} is not a folder: {instead}")
    if not _is_own(found) and not (above and found.st_uid in _roots()):
        raise UserError(f"{folder} belongs to another user ({found.st_uid}): {instead}")
    if _others_write(found) and not (above and sticky):
        mend = f"run `chmod go-w {folder}`, or " if _is_own(found) and not sticky else ""
        mode = f"mode {stat.S_IMODE(found.st_mode):o}"
        raise UserError(f"others may write to {folder} ({mode}): {mend}{instead}")


def close_private(folder: Path, instead: str) -> None:
    """Check that nobody else has put anything into a private folder before it was one, and let nobody else in.

    Raises:
        UserError: names what another user may have written.
    """
    was_open = bool(folder.lstat().st_mode & 0o077)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            try:
                found = path.lstat()
            except FileNotFoundError:  # another process is at work here
                continue
            if not _is_own(found) or (was_open and _others_write(found)):
                raise UserError(
                    f"another user may have written {path}: delete {folder}, or {instead}"
                )
    if was_open and _POSIX:
        folder.chmod(0o700)


def is_private(path: Path) -> bool:
    """True if a file belongs to this user, and nobody else may write to it."""
    found = path.lstat()
    return _is_own(found) and not _others_write(found)


def _is_own(found: os.stat_result) -> bool:
    return not _POSIX or found.st_uid == os.geteuid()


def _others_write(found: os.stat_result) -> bool:
    mode = found.st_mode
    if not _POSIX or stat.S_ISLNK(mode):  # a link has no mode of its own
        return False
    return bool(mode & 0o002 or (mode & 0o020 and not _is_own_group(found.st_gid)))


@cache
def _is_own_group(group: int) -> bool:
    """True if a group has no member but this user, as many systems make one for each user."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return group != 0 and found.gr_name == name and set(found.gr_mem) <= {name}


@cache
def _roots() -> frozenset[int]:
    """Users who may do anything: root, which a user namespace without it shows as the overflow user."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:  # not Linux
        return frozenset({0})
    return frozenset({0} if mapped == ["0", "0", "4294967295"] else {0, overflow})


# Names the folder, where it is set.
FOLDER = "WEFT_CACHE"


def chosen_folder() -> Path | None:
    """The folder that the variable `WEFT_CACHE` names; None if it is not set."""
    chosen = os.environ.get(FOLDER)
    return Path(chosen) if chosen else None


def default_folder() -> Path:
    """The folder `weft` in the user's folder for caches."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "weft"
