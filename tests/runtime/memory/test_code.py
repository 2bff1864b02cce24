"""Code that only compiling ran leaves the process; what anybody has written to stays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weft.runtime.memory import code
from weft.runtime.memory.code import clean_code, let_go_of_code, mappings

TORCH, OTHER, DATA = "/lib/libtorch.so", "/lib/with spaces.so", "/data/weights.bin"


def part(path, permissions, resident, own=0, start=0x1000):
    """The lines that smaps has of a mapping."""
    return [
        f"{start:x}-{start + 0x1000:x} {permissions} 00000000 fe:00 26085 {path}".rstrip() + "\n",
        "Size:                  4 kB\n",
        f"Rss:                  {resident} kB\n",
        f"Anonymous:             {own} kB\n",
        "THPeligible:           0\n",
        "VmFlags: rd mr mw me\n",
    ]


def test_the_parts_of_libraries_that_nobody_wrote_to():
    lines = [
        *part(TORCH, "r--p", 8),
        *part(TORCH, "r-xp", 16, start=0x5000),
        *part(TORCH, "r--p", 4, own=4),  # relocated when it was loaded
        *part(TORCH, "rw-p", 4, own=4),
        *part(OTHER, "r-xp", 4, own=4),  # with a breakpoint
        *part(OTHER, "r--p", 4, start=0x9000),
        *part(DATA, "r--p", 64),
        *part("", "r-xp", 4),
        *part("[vdso]", "r-xp", 4),
        *part(OTHER, "r-xp", 0),
    ]
    found = clean_code(mappings(lines))
    assert [(each.path, each.start, each.end, each.resident) for each in found] == [
        (TORCH, 0x1000, 0x2000, 8192),
        (TORCH, 0x5000, 0x6000, 16384),
        (OTHER, 0x9000, 0xA000, 4096),
    ]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_code_leaves_the_process_and_runs_again(monkeypatch):
    monkeypatch.setattr(code, "is_free_to_choose", lambda environment: True)
    x = torch.randn(64, 64)
    expected = x @ x
    went = let_go_of_code.__wrapped__()
    assert went > 2**20
    assert torch.equal(x @ x, expected)
    assert let_go_of_code.__wrapped__() < went  # little of it was needed again


@pytest.mark.parametrize(("platform", "free"), [("win32", True), ("linux", False)])
def test_nothing_leaves_where_memory_is_left_to_the_user(monkeypatch, platform, free):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(code, "is_free_to_choose", lambda environment: free)
    assert let_go_of_code.__wrapped__() == 0


def test_nothing_leaves_where_the_kernel_does_not_show_it(monkeypatch, tmp_path):
    monkeypatch.setattr(code, "is_free_to_choose", lambda environment: True)
    monkeypatch.setattr(code, "_SMAPS", tmp_path / "none")
    assert let_go_of_code.__wrapped__() == 0
