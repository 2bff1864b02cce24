"""Code run as another user of this host, who has no rights here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STRANGER = 65534

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"
)

_LEAVE = f"\nimport os\nos.setgroups([])\nos.setgid({STRANGER})\nos.setuid({STRANGER})\n"


def start_as_stranger(
    code: str, *arguments: str, imports: str = "import os"
) -> subprocess.Popen[str]:
    """Start Python code as another user; `imports` is run before, as this user."""
    return subprocess.Popen(
        [sys.executable, "-c", imports + _LEAVE + code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_as_stranger(code: str, *arguments: str, imports: str = "import os") -> str:
    """What Python code prints that runs as another user."""
    with start_as_stranger(code, *arguments, imports=imports) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return output
