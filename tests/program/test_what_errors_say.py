"""Errors of calls that a loop for one device makes: what they say, at whose line, and how long they are."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import BatchError, CaptureError, UserError

X = torch.sin(torch.arange(32.0, dtype=torch.float64)).reshape(8, 4)


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with weft.local_world(2):
        yield


def squares(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch[0] if isinstance(batch, tuple) else batch).square().mean()
    return found


def compiled(optimizer: Any = torch.optim.SGD, batch: Any = X, loss_fn: Any = squares) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    place = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, optimizer(model.parameters()), batch, placement=place)


def branches(model: nn.Module, batch: Any) -> Any:
    if squares(model, batch) > 1:
        return squares(model, batch)
    return squares(model, batch) * 2


def raises(model: nn.Module, batch: Any) -> Any:
    raise ValueError("mine")


def shown(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def test_errors_show_the_users_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(lambda: compiled(loss_fn=branches))
    assert text.count("the step would depend on the values") == 1
    files = [line.split('"')[1] for line in text.splitlines() if line.startswith('  File "')]
    assert {file for file in files if "weft" in file and file != __file__} == {
        weft.tracebacks.__file__  # type: ignore[attr-defined]
    }
    assert len(text.splitlines()) < 20
    with compiled_program() as program:
        assert len(shown(lambda: program.step(X.float())).splitlines()) < 20
        monkeypatch.setenv("WEFT_TRACEBACK", "full")
        assert len(shown(lambda: program.step(X.float())).splitlines()) > 20
    assert len(shown(lambda: compiled(loss_fn=branches)).splitlines()) > 60


def test_what_the_user_raises_is_a_cause_that_is_shown() -> None:
    text = shown(lambda: compiled(loss_fn=raises))
    assert 'raise ValueError("mine")\nValueError: mine' in text
    assert "direct cause" in text
    assert "weft/capture" not in text


class compiled_program:
    """A program that is closed at the end."""

    def __init__(self, **named: Any) -> None:
        self._named = named

    def __enter__(self) -> Any:
        self._program = compiled(**self._named)
        return self._program

    def __exit__(self, *_: object) -> None:
        self._program.close()


def test_a_step_takes_one_batch() -> None:
    with compiled_program(batch=(X, X)) as program, pytest.raises(UserError) as caught:
        program.step(X, X)
    assert "a step takes one batch" in str(caught.value)
    assert "program.step((x, y))" in str(caught.value)


def test_backward_of_what_a_step_returns() -> None:
    with compiled_program() as program:
        loss = program.step(X)
    with pytest.raises(UserError, match=r"program\.step has returned.*Leave backward\(\)"):
        loss.backward()
    file = io.BytesIO()
    torch.save({"loss": loss, "two": copy.deepcopy(loss)}, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again["loss"] == loss
    assert again["two"] == loss
    assert not vars(again["loss"])


def test_lbfgs_is_refused_before_the_step_is_captured_with_the_way_that_works() -> None:
    def never(model: nn.Module, batch: Any) -> Tensor:
        raise AssertionError("it was called")

    with pytest.raises(CaptureError) as caught:
        compiled(torch.optim.LBFGS, loss_fn=never)
    assert "program.step(batch, update=False)" in str(caught.value)

    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(plain, X)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    wanted = [float(optimizer.step(closure).detach()) for _ in range(2)]  # type: ignore[attr-defined]
    with compiled_program() as program:
        live = torch.optim.LBFGS(program._core.setting.model.parameters(), lr=0.5)

        def evaluated() -> Any:
            live.zero_grad()
            return program.step(X, update=False)

        found = [float(live.step(evaluated)) for _ in range(2)]
    assert found == pytest.approx(wanted, rel=1e-9)


class Own(torch.optim.Optimizer):
    """An optimizer whose update of a parameter is given."""

    def __init__(self, parameters: Any, update: Callable[..., object]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(self, p)


def branching(optimizer: Any, p: Any) -> None:
    p.add_(p.grad, alpha=-max(0.1, p.norm()))


def elsewhere(optimizer: Any, p: Any) -> None:
    norm = optimizer.state[p].setdefault("norm", torch.ones((), dtype=p.dtype))
    norm.copy_(p.norm())


def failing(optimizer: Any, p: Any) -> None:
    p.add_(p.grad, alpha=[])


@pytest.mark.parametrize(
    ("update", "line", "words"),
    [
        (branching, "max(0.1, p.norm())", "branches on the value of a tensor"),
        (elsewhere, "norm.copy_(p.norm())", "torch.ones((), device=param.device)"),
        (failing, "alpha=[]", "failed with TypeError"),
    ],
)
def test_optimizers_are_refused_with_their_line(update: Any, line: str, words: str) -> None:
    with pytest.raises(CaptureError) as caught:
        compiled(lambda parameters: Own(parameters, update))
    where, text = str(caught.value).split("\n", 1)
    assert where.startswith(f"{__file__}:")
    assert line in where
    assert words in text
    assert "must not branch" not in text


def test_optimizers_of_sparse_gradients_and_with_states_of_no_parameter() -> None:
    with pytest.raises(
        CaptureError, match="the gradients of a plan are dense: use an optimizer for dense"
    ):
        compiled(torch.optim.SparseAdam)

    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.state["calls"] = 0  # type: ignore[index]

    with pytest.raises(CaptureError, match=r"self.state\['calls'\], which belongs to no parameter"):
        compiled(Counting)


class Graph:
    """A batch as libraries have them: an object with tensors."""

    x = X


def test_batches_that_are_objects() -> None:
    with pytest.raises(BatchError, match="of type Graph; .* pass a dict of its tensors instead"):
        compiled(batch=Graph())
    with pytest.raises(BatchError, match=r"convert it with torch\.as_tensor"):
        compiled(batch={"x": X.numpy()})


class Switching(nn.Linear):
    """Becomes another one in its first call, as models do for short texts."""

    kind: Any = "sparse"

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            self.kind = "full"
        return super().forward(x)


def test_a_text_that_the_step_changes_is_no_tensor() -> None:
    model = Switching(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters())
    place = weft.placement("cpu", [0, 1])
    with pytest.raises(CaptureError, match="from 'sparse' to 'full'.* Set it before") as caught:
        weft.compile(model, squares, optimizer, X, placement=place)
    assert type(caught.value) is CaptureError
    model(X)
    program = weft.compile(model, squares, optimizer, X, placement=place)
    program.step(X)
    program.close()
