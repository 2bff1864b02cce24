"""An interrupt while modules are imported comes afterwards, and leaves no half of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from weft.capture import whole_imports

SCRIPT = """
import importlib.abc, os, signal, sys, torch
from torch import nn
import weft

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "sympy.core":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
model = nn.Linear(2, 2)

def compiled():
    return weft.compile(
        model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), 0.1),
        torch.ones(2, 2), placement=weft.placement("cpu", [0]),
    )

assert "sympy" not in sys.modules
try:
    compiled()
except KeyboardInterrupt:
    print("interrupted")
print(compiled().step(torch.ones(2, 2)).shape)
"""


@pytest.mark.slow
def test_a_program_is_compiled_after_one_that_was_interrupted() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["interrupted", "torch.Size([])"], done.stderr[-2000:]


def test_handlers_of_users_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    try:
        with whole_imports._interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            assert found == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_import_too() -> None:
    whole_imports.import_whole.cache_clear()
    thread = threading.Thread(target=whole_imports.import_whole)
    thread.start()
    thread.join(60)
    assert whole_imports.import_whole.cache_info().currsize == 1
