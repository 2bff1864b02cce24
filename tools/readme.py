"""A pytest plugin that executes the code blocks of markdown files: `pytest -p tools.readme README.md`.

Blocks marked `python` run unmodified and in order, in one namespace for each file. Blocks marked `bash` run in a shell
of their own at the root of the project and must exit with 0. Commands that are only shown are marked `console`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

SECONDS = 180


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
    path=str(Path(__file__).parents[1]),
    parsers=[PythonCodeBlockParser(), CodeBlockParser(language="bash", evaluator=run_shell)],
    patterns=["*.md"],
).pytest()
