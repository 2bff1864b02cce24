"""A pytest plugin that executes the code blocks of markdown files: `pytest -p tools.readme README.md`.

Blocks marked `python` run unmodified and in order, in one namespace and one empty folder for each file. Blocks marked
`bash` run in a shell of their own at the root of the project and must exit with 0. Commands that are only shown are
marked `console`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

ROOT = Path(__file__).parents[1]
SECONDS = 180


def enter_folder(namespace: dict[str, Any]) -> None:
    """Make an empty folder the current one."""
    namespace["_home"], namespace["_folder"] = os.getcwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def leave_folder(namespace: dict[str, Any]) -> None:
    """Go back, and remove what the blocks left."""
    os.chdir(namespace["_home"])
    namespace["_folder"].cleanup()


def run_shell(example: Example) -> str | None:
    """Run one `bash` block; returns what went wrong, or None."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", str(example.parsed)],
        cwd=Path(example.path).parent,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if result.returncode == 0:
        return None
    return f"exit code {result.returncode} of the block\n{example.parsed}\n{result.stdout}"


pytest_collect_file = Sybil(
    path=str(ROOT),
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="bash", evaluator=run_shell)],
    patterns=["*.md"],
    setup=enter_folder,
    teardown=leave_folder,
).pytest()
