"""Files are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.atomic_files import check_writable, write_atomically, write_making_folder
from weft.errors import UserError


def test_it_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    for text in ("first", "second"):
        write_atomically(place, text, "the file")
        assert place.read_text() == text
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_was_there_stays_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a.json"
    place.write_text("first")

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w") as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"cannot write the file .*: No space left on device; give"):
        write_atomically(place, "second", "the file")
    assert (place.read_text(), os.listdir(tmp_path)) == ("first", ["a.json"])


def test_the_locale_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read as UTF-8 is written so."""
    monkeypatch.setattr(
        "io.text_encoding", lambda given, *_: given or pytest.fail("no encoding was given")
    )
    write_making_folder(tmp_path / "new" / "a.json", "ναί", "the file")
    assert (tmp_path / "new" / "a.json").read_bytes() == "ναί".encode()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the file .*/a/b.json: (Not a|File exists)"):
        write_making_folder(tmp_path / "a" / "b.json", "text", "the file")


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    write_atomically(tmp_path / "link", "text", "the file")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.json").read_text() == "text"


def test_places_are_checked_and_left_as_they_were(tmp_path: Path) -> None:
    check_writable(tmp_path / "a.json", "the file")
    (tmp_path / "b.json").write_text("text")
    check_writable(tmp_path / "b.json", "the file")
    assert (tmp_path / "b.json").read_text() == "text"
    assert os.listdir(tmp_path) == ["b.json"]
    for wrong in (tmp_path, tmp_path / "no" / "a.json"):
        with pytest.raises(UserError, match="cannot write the file"):
            check_writable(wrong, "the file")
