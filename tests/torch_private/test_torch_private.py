"""Each private name of torch that weft uses does what weft needs it for, and weft uses no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import torch_private
from tools.torch_private import PAGE, Use, fault_of, own_uses, page, uses
from tools.torch_probes import PROBES, Probe


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.filterwarnings("ignore")
def test_torch_does_what_weft_needs(name: str) -> None:
    assert fault_of(name) == ""


def test_the_names_are_those_that_weft_uses() -> None:
    assert {use.name for use in own_uses()} == set(PROBES)


def test_the_page_is_of_this_tree() -> None:
    assert PAGE.read_text() == page(), "python -m tools.torch_private writes docs/private_apis.md"


def test_names_are_found_however_they_are_imported(tmp_path: Path) -> None:
    text = """
import torch
import torch.fx._symbolic_trace as trace
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

module = "torch._inductor.config"
torch._foreach_add_([], [])
pytree.tree_map(len, [])
trace._flag = torch._C.DispatchKey.Negative
nn.Linear(1, 1).weight._use_count()
replaced((nn.Module, "_apply", len))
sys._getframe()
self._own()
_mine()._mine_too.x
class A:
    def _mine_too(self): ...
"""
    (tmp_path / "a.py").write_text(text)
    assert set(uses(tmp_path)) == {
        Use(name, "a.py")
        for name in (
            "torch._foreach_add_",
            "torch._inductor.config",
            "torch._ops.OpOverload",
            "torch.utils._pytree.tree_map",
            "torch.fx._symbolic_trace._flag",
            "torch._C.DispatchKey.Negative",
            "._use_count",
            "torch.nn.Module._apply",
        )
    }


def test_what_a_new_torch_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> bool:
        raise AttributeError("no attribute '_gone'")

    probes = {"torch._gone": Probe("x", gone), "torch._other": Probe("y", lambda: False)}
    monkeypatch.setattr(torch_private, "PROBES", probes)
    assert list(torch_private.broken()) == [
        "torch._gone, for x: AttributeError: no attribute '_gone'",
        "torch._other, for y: does something else",
    ]
