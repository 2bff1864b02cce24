"""Batches are taken apart by key and checked; what the loss function returned is built again."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import models
import reference
from weft.capture import capture
from weft.capture.batch import describe_batch
from weft.errors import BatchError
from weft.ir.logical import Output

Pair = namedtuple("Pair", "image label")


def keys_of(batch: Any) -> list[str]:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(torch.ones(2, 8)).sum()

    captured = capture(models.MLP(), loss_fn, None, batch)
    return [leaf.key for leaf in captured.batch.tensors]


@pytest.mark.parametrize(
    ("batch", "keys"),
    [
        (torch.ones(1), ["batch"]),
        ((torch.ones(1), torch.ones(2)), ["[0]", "[1]"]),
        ({"a": {"b": torch.ones(1)}, "c": 3}, ["a.b"]),
        ([torch.ones(1), {"mask": torch.ones(1)}], ["[0]", "[1].mask"]),
        ({"a": [torch.ones(1)]}, ["a[0]"]),
        (Pair(torch.ones(1), None), ["image"]),
    ],
)
def test_keys(batch: Any, keys: list[str]) -> None:
    assert keys_of(batch) == keys


NOT_DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged),
    "nested, strided": lambda: torch.nested.nested_tensor([torch.ones(2, 8)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 8), 1.0, 0, torch.qint8),
    "sparse": lambda: torch.ones(2, 8).to_sparse(),
    "sparse, compressed": lambda: torch.ones(2, 8).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_batch_is_dense(kind: str) -> None:
    """As an example, and as a later batch."""
    leaf, word = NOT_DENSE[kind](), kind.split(",")[0]
    with pytest.raises(BatchError, match=rf"'x' of the batch is a {word}.* expected a dense one"):
        describe_batch({"x": leaf})
    spec = describe_batch({"x": torch.ones(2, 8)})
    assert spec.read_batch({"x": leaf}) is None
    with pytest.raises(BatchError, match=rf"'x' of the batch is a {word}"):
        spec.flatten_batch({"x": leaf})


def test_containers_of_users_are_taken_apart() -> None:
    """Those that they have registered with torch's pytree, which have no length."""

    @dataclass
    class Texts:
        x: torch.Tensor

    pytree.register_dataclass(Texts)
    spec = describe_batch(Texts(torch.ones(2)))
    assert spec.read_batch(Texts(torch.ones(2))) is None
    (leaf,) = spec.flatten_batch(Texts(torch.zeros(2))).values()
    assert torch.equal(leaf, torch.zeros(2))


def test_two_leaves_of_one_key() -> None:
    with pytest.raises(BatchError, match=r"two leaves .* 'a\.b'"):
        keys_of({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    return models.classification_loss(model, batch) * batch["scale"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(8, 9)}, r"'x'.*float32\[8, 8\], got a tensor float32\[8, 9\]"),
        ({"x": torch.ones(8, 8).double()}, r"'x'.*got a tensor float64"),
        ({"y": 3}, r"'y'.*int64\[8\], got 3 of type int"),
        ({"scale": torch.ones(())}, r"'scale'.*the constant 2.0, got a tensor"),
        ({"more": torch.ones(1)}, r"the leaves \['x', 'y', 'scale', 'more'\]"),
    ],
)
def test_batches_that_differ(change: dict[str, Any], words: str) -> None:
    batch = {**models.vector_batch(dtype=torch.float32), "scale": 2.0}
    captured = capture(models.MLP(), scaled, None, batch)
    assert set(captured.batch.flatten_batch(batch)) == {"x", "y"}
    with pytest.raises(BatchError, match=words):
        captured.batch.flatten_batch({**batch, **change})


def test_a_list_in_place_of_a_tuple_is_the_same() -> None:
    captured = capture(models.MLP(), lambda m, b: m(b[0]).sum(), None, (torch.ones(2, 8),))
    x = torch.ones(2, 8)
    assert captured.batch.flatten_batch([x])["[0]"] is x


def run(captured: Any, model: nn.Module, batch: Any) -> Any:
    result = reference.run_graph(captured.graph, reference.model_inputs(model, captured, batch))
    return captured.unflatten_outputs(result.outputs)


def test_constants_of_the_batch_are_those_of_the_example() -> None:
    model, batch = models.MLP(), {**models.vector_batch(dtype=torch.float32), "scale": 2.0}
    loss = run(capture(model, scaled, None, batch), model, batch)
    torch.testing.assert_close(loss, scaled(model, batch))


@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (lambda loss, out: loss, ["loss"]),
        (lambda loss, out: (loss, out), ["loss", "[1]"]),
        (lambda loss, out: [loss, {"out": out, "n": 3}], ["loss", "[1].out"]),
        (lambda loss, out: {"out": {"raw": out}, "loss": loss}, ["out.raw", "loss"]),
        (lambda loss, out: Pair(loss, out), ["loss", "label"]),
    ],
)
def test_results_come_back_as_they_were_built(build: Any, keys: list[str]) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        out = model(batch["x"])
        return build(nn.functional.cross_entropy(out, batch["y"]), out)

    torch.manual_seed(0)
    model, batch = models.MLP(), models.vector_batch(dtype=torch.float32)
    captured = capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
    assert [node.key for node in captured.graph.of_kind(Output)] == keys
    expected = loss_fn(model, batch)
    found = run(captured, model, batch)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


def test_evaluation_returns_any_nest_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    model, batch = models.MLP(dropout=0.5).double(), models.vector_batch()
    model.dropout.eval()
    captured = capture(
        model, lambda m, b: [m(b["x"]), {"n": b["y"].sum()}], None, batch, training=False
    )
    assert [node.key for node in captured.graph.of_kind(Output)] == ["[0]", "[1].n"]
    assert "weft.uniform" not in str(captured.graph)
    assert [m.training for m in (model, model.hidden, model.dropout)] == [True, True, False]
    out, rest = run(captured, model, batch)
    torch.testing.assert_close(out, model(batch["x"]))
    assert rest["n"] == batch["y"].sum()


def test_a_batch_tensor_or_a_variable_may_be_returned() -> None:
    model, batch = models.MLP(), models.vector_batch(dtype=torch.float32)
    captured = capture(
        model, lambda m, b: (b["x"], m.head.weight, b["x"]), None, batch, training=False
    )
    torch.testing.assert_close(
        run(captured, model, batch), (batch["x"], model.head.weight.detach(), batch["x"])
    )


def test_plain_batches_are_read_the_short_way() -> None:
    x, y, z = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(())
    example = {"a": [x, (y,)], "b": z}
    spec = describe_batch(example)
    assert spec.read_batch(example) == spec.flatten_batch(example)
    assert spec.read_batch({"a": [z, (y,)], "b": z}) is None
    assert spec.read_batch({"a": [x, (y.float(),)], "b": z}) is None
    assert spec.read_batch({"a": (x, [y]), "b": z}) == spec.read_batch(example)
    assert spec.read_batch({"b": z, "a": [x, (y,)]}) is None
    assert spec.read_batch({"a": [x, (y, z)], "b": z}) is None
    assert spec.read_batch({"a": [nn.Parameter(x), (y,)], "b": z}) is None
    assert describe_batch({"x": x, "n": 3}).read_batch({"x": x, "n": 3}) is None


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: Encoding({"x": x, "y": y}),
        lambda x, y: Sample(x, y),
        lambda x, y: [Sample(x, y)],
        lambda x, y: {"a": Encoding({"x": x, "y": y})},
        lambda x, y: MappingProxyType({"x": x, "y": y}),
    ],
)
def test_containers_of_other_classes(make: Callable[..., Any]) -> None:
    kinds = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        kinds.append(type(batch))
        batch = batch[0] if isinstance(batch, list) else batch
        batch = batch.get("a", batch) if isinstance(batch, dict) else batch
        x, y = (batch.x, batch.y) if hasattr(batch, "x") else (batch["x"], batch["y"])
        return nn.functional.cross_entropy(model(x), y)

    model, plain = models.MLP(), models.vector_batch(dtype=torch.float32)
    batch = make(plain["x"], plain["y"])
    captured = capture(model, loss_fn, None, batch)
    torch.testing.assert_close(run(captured, model, batch), loss_fn(model, batch))
    assert set(kinds) == {type(batch)}


def test_entries_in_another_order() -> None:
    plain = models.vector_batch(dtype=torch.float32)
    captured = capture(models.MLP(), models.classification_loss, None, plain)
    other = dict(reversed(plain.items()))
    assert list(captured.batch.flatten_batch(other)) == list(plain)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.ones(8, 8)}, r"\['y'\] are missing"),
        ({"x": 1, "y": 2, "z": 3}, r"\['z'\] are new"),
        (
            {"x": numpy.ones((8, 8), "f4"), "y": numpy.ones(8)},
            r"got a numpy.ndarray float32\[8, 8\], which torch.as_tensor makes a tensor",
        ),
    ],
)
def test_batches_that_differ_are_told_in_one_line(batch: Any, words: str) -> None:
    plain = models.vector_batch(dtype=torch.float32)
    captured = capture(models.MLP(), models.classification_loss, None, plain)
    with pytest.raises(BatchError, match=words) as caught:
        captured.batch.flatten_batch(batch)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("example", "batch", "words"),
    [
        (
            [1, Sample(1, 2)],
            [1, Encoding(x=1, y=2, scale=3)],
            r"got \[…, \{'x': …, .*expected \[…, Sample",
        ),
        (Sample(1, 2), {"x": 1, "y": 2, "scale": 1.0}, r"expected Sample\(x=…, y=…, scale=…\)$"),  # type: ignore[arg-type]
    ],
    ids=["mapping", "dataclass"],
)
def test_other_containers_are_shown_as_python_does(example: Any, batch: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        describe_batch(example).flatten_batch(batch)


def test_objects_beside_the_loss_come_back_as_none() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return {"loss": models.classification_loss(model, batch), "cache": object()}

    model, batch = models.MLP(), models.vector_batch(dtype=torch.float32)
    captured = capture(model, loss_fn, torch.optim.SGD(model.parameters()), batch)
    assert run(captured, model, batch)["cache"] is None
