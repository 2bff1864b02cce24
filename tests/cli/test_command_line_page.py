"""docs/reference/command_line.md says what the command says of itself."""

from __future__ import annotations

from tools.command_line import PAGE, page


def test_the_page_is_that_of_the_command() -> None:
    assert PAGE.read_text() == page(), "python -m tools.command_line writes the page"
