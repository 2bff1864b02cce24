"""Write the help of the command `weft` to docs/reference/command_line.md: `python -m tools.command_line`.

A test compares the page with the command. The text is what Typer writes for commands, but for its list of them, which
it cuts short.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/reference/command_line.md"
SECONDS = 60
_HEAD = """# The command `weft`

Every command of `weft` with its arguments and options.

Written by `python -m tools.command_line` from the command's own help.

"""


def page() -> str:
    """The text of the page.

    Raises:
        subprocess.CalledProcessError: the command cannot be imported.
    """
    command = [sys.executable, "-m", "typer", "weft.cli.main", "utils", "docs", "--name", "weft"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    body = html.unescape(result.stdout.strip()).partition("\n")[2].strip()
    body = body.replace("* `--help`: Show this message and exit.\n", "")
    firsts = dict(re.findall(r"^## `weft (\w+)`\n\n(.+)$", body, re.MULTILINE))

    def listed(match: re.Match[str]) -> str:
        name = match[1]
        return f"* [`{name}`](#weft-{name}): {firsts[name]}"

    return _HEAD + re.sub(r"^\* `(\w+)`: .*\.\.\.$", listed, body, flags=re.MULTILINE) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
