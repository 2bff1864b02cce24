"""Extras that no file of a checkpoint can hold are named, with what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import weft
from program.checkpoint.nets import Case, batch_of, compiled
from weft.errors import UserError
from weft.program.checkpoint.values import check_plain


class Renamed(torch.Tensor):
    """A class of the user's, whose values are those of a plain tensor."""


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


def _named() -> torch.Tensor:
    if not hasattr(torch.Tensor, "names"):
        pytest.skip("this torch has no named dimensions")
    named: torch.Tensor = torch.zeros(2, names=("N",))  # type: ignore[call-overload]
    return named


ODD: dict[str, tuple[Any, str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"sparse_coo.*tensor\.to_dense\(\)"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr.*tensor\.to_dense\(\)"),
    "meta": (lambda: torch.zeros(3, device="meta"), r"shape \[3\] on the meta device"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        r"quantized.*tensor\.dequantize\(\)",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1)]), r"nested.*unbind\(\)"),
    "lazy": (lambda: nn.LazyLinear(2).weight, "without a shape"),
    "fake": (_fake, "class FakeTensor"),
    "dtype": (lambda: torch.zeros(2, dtype=torch.complex128), "complex128.*view_as_real"),
    "named": (_named, r"tensor\.rename\(None\)"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_saved_is_named(kind: str) -> None:
    make, why = ODD[kind]
    with pytest.raises(UserError, match=rf"extra\.a is .*{why}"):
        check_plain(make(), "extra.a")


def test_of_global_tensors_those_are_named_that_are_no_values() -> None:
    with weft.local_world(2):
        place = weft.placement("cpu", [0, 1])
        check_plain(weft.zeros(4, placement=place, sbp=weft.split(0)), "extra.a")
        tensor = weft.zeros(4, placement=place, sbp=weft.partial("sum"))
        with pytest.raises(UserError, match=r"extra\.a is a global tensor .*tensor\.full\(\)"):
            check_plain(tensor, "extra.a")


class Failing:
    """An object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"a": {"b": [torch.eye(2).to_sparse()]}}, r"extra\.a\.b\.0 is .*to_dense"),
        ({"a": Failing()}, r"extra\.a, a Failing, gives no state_dict\(\): RuntimeError: not now"),
        ({"a": nn.Linear}, r"extra\.a is a type"),
        ({"a": 1 << 20_000}, r"extra\.a is a number of 20001 bits"),
        ([("a", 1)], "extra must be a dict"),
    ],
    ids=["inside", "failing", "class", "huge", "list"],
)
def test_a_checkpoint_names_the_place(extra: Any, why: str, tmp_path: Path) -> None:
    with compiled(Case()) as (program, _):
        with pytest.raises(UserError, match=why):
            program.save(tmp_path / "saved", extra)
        assert list(tmp_path.iterdir()) == []
        program.step(batch_of(0))


def test_views_and_plain_classes_come_back(tmp_path: Path) -> None:
    given = {
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "strided": torch.arange(6).reshape(2, 3).t(),
        "class": torch.ones(2).as_subclass(Renamed),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    with compiled(Case()) as (program, _):
        program.save(tmp_path / "saved", given)
        found = program.load(tmp_path / "saved")
    for name, value in given.items():
        plain = value.detach().as_subclass(torch.Tensor)
        assert torch.equal(found[name], plain.resolve_conj().resolve_neg()), name
