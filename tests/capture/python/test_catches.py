"""Checks whose exception the program may catch are branches, and refused; those beside a `try` are checked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from single_device import assert_same_training, compiled, plain_training
from weft.capture import capture
from weft.errors import CaptureError, RankFailure

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell what it tests"),
]


LOG: list[str] = []


class NegativeError(ValueError):
    """Of this file."""


def positive(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise NegativeError("negative")
    return x


def in_a_try(x: Tensor) -> Tensor:
    try:
        if (x < 0).any():
            raise ValueError("negative")
    except ValueError:
        return x * 2
    return x


def asserted_in_a_try(x: Tensor) -> Tensor:
    try:
        assert (x >= 0).all()
    except (KeyError, AssertionError):
        return x * 2
    return x


def called_in_a_try(x: Tensor) -> Tensor:
    try:
        return positive(x)
    except Exception:
        return x * 2


def called_in_a_bare_try(x: Tensor) -> Tensor:
    try:
        return nn.Sequential(Checked())(x)
    except:  # noqa: E722
        return x * 2


def changed_on_the_way(x: Tensor) -> Tensor:
    def inner() -> Tensor:
        try:
            return positive(x)
        except ValueError as error:
            raise KeyError("negative") from error

    try:
        return inner()
    except KeyError:
        return x * 2


def raised_again_or_not(x: Tensor) -> Tensor:
    try:
        return positive(x)
    except ValueError:
        if x.dim() == 2:
            return x * 2
        raise


def finally_returns(x: Tensor) -> Tensor:
    try:
        return positive(x)
    finally:
        return x * 2  # noqa: B012, SIM107


def finally_goes_on(x: Tensor) -> Tensor:
    for _ in range(2):
        try:
            positive(x)
        finally:
            continue  # noqa: B012
    return x


def suppressed(x: Tensor) -> Tensor:
    with torch.enable_grad(), contextlib.suppress(ValueError):
        x = positive(x) * 2
    return x + 1


def suppressed_by_a_name(x: Tensor) -> Tensor:
    quiet = contextlib.suppress(ValueError)
    with quiet:
        x = positive(x) * 2
    return x + 1


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        LOG.append(str(error))


def another_class(x: Tensor) -> Tensor:
    try:
        return positive(x)
    except (KeyError, TypeError):
        return x * 2


@contextlib.contextmanager
def loudly() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        LOG.append(str(error))
        raise
    finally:
        LOG.append("done")


class Quiet:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is ValueError or kind is NegativeError


class Loud(Quiet):
    def __exit__(self, *_: object) -> bool:  # type: ignore[exit-return]
        return False


def in_own_contexts(x: Tensor) -> Tensor:  # type: ignore[return]
    with loudly(), Loud(), contextlib.suppress(KeyError):
        return positive(x)


def suppressed_by_a_generator(x: Tensor) -> Tensor:
    with quietly():
        x = positive(x) * 2
    return x + 1


def suppressed_by_a_class(x: Tensor) -> Tensor:
    with torch.enable_grad(), Quiet():
        x = positive(x) * 2
    return x + 1


def suppressed_by_an_object(x: Tensor) -> Tensor:
    quiet = Quiet()
    with quiet:
        x = positive(x) * 2
    return x + 1


def a_lambda_in_a_try(x: Tensor) -> Tensor:
    try:
        return (lambda one: positive(one))(x)
    except ValueError:
        return x * 2


def an_attribute(x: Tensor) -> Tensor:
    class Holder:
        @property
        def kept(self) -> Tensor:
            if (x < 0).any():
                raise AttributeError("kept")
            return x

    return getattr(Holder(), "kept", x * 2)


def an_end_of_items(x: Tensor) -> Tensor:
    class Rows:
        def __getitem__(self, at: int) -> Tensor:
            if at > 5 or (x[at] < 0).any():
                raise IndexError(at)
            return x[at]

    return torch.stack([torch.ones(4), *Rows()])


def a_generator(x: Tensor) -> Tensor:
    def parts() -> Iterator[Tensor]:
        if (x < 0).any():
            yield x * 2
            raise ValueError("negative")
        yield x

    return next(parts())


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return positive(x)


CAUGHT = [in_a_try, asserted_in_a_try, called_in_a_try, called_in_a_bare_try, changed_on_the_way]
CAUGHT += [raised_again_or_not, finally_returns, finally_goes_on, suppressed, suppressed_by_a_name]
CAUGHT += [suppressed_by_a_generator, suppressed_by_a_class, suppressed_by_an_object]
CAUGHT += [a_lambda_in_a_try, an_attribute, an_end_of_items, a_generator]
# Whether these catch it, nobody looks into them to see.
MAY_CATCH = [another_class, in_own_contexts]
GOOD = torch.linspace(0, 1, 32).reshape(8, 4)
BAD = GOOD.index_fill(0, torch.tensor([1]), -1.0)


@pytest.mark.parametrize("function", CAUGHT + MAY_CATCH, ids=lambda function: function.__name__)
def test_a_raise_that_is_caught_is_a_branch(function: Callable[[Tensor], Tensor]) -> None:
    def loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
        return {"x": function(batch)}

    function(GOOD)
    if function in CAUGHT:
        function(BAD)  # raises nothing
    with pytest.raises(CaptureError, match="values in a tensor"):
        capture(nn.Linear(1, 1), loss, None, GOOD, training=False)


def raised_again(x: Tensor) -> Tensor:
    try:
        return positive(x)
    except ValueError:
        for _ in range(2):
            if x.dim() == 2:
                continue
        raise
    finally:
        x = x * 2


def in_a_handler(x: Tensor) -> Tensor:
    try:
        raise KeyError
    except KeyError:
        positive(x)
    return x


def after_a_try(x: Tensor) -> Tensor:
    try:
        scale = 2
    except ValueError:
        scale = 3
    else:
        positive(x)
    return positive(x) * scale


def defined_in_a_try(x: Tensor) -> Tensor:
    try:

        def check(one: Tensor) -> Tensor:
            with torch.enable_grad():
                return positive(one)

    except ValueError:
        pass
    return check(x)


def with_an_else(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    elif x.dim() == 2:  # noqa: RET506
        x = x * 2
    else:
        x = x * 3
    return x + 1


def in_a_loop(x: Tensor) -> Tensor:
    for at in range(3):
        if (x < at).any():
            raise ValueError("negative")
        if at == 2:
            break
        x = x + 1
    else:
        x = x * 5
    return x


def every_layer(x: Tensor) -> Tensor:
    return nn.Sequential(Checked(), nn.Tanh(), Checked())(x - 0.0)


def at_its_end(x: Tensor) -> Tensor:
    return positive(x.abs() - (x < 0) * 9)


def in_a_finally(x: Tensor) -> Tensor:
    try:
        x = x * 2
    finally:
        if (x < 0).any():
            raise ValueError("negative")
    return x


def recomputed(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_() if not x.requires_grad else x
    return checkpoint(at_its_end, x, use_reentrant=False)  # type: ignore[no-any-return]


def in_contexts(x: Tensor) -> Tensor:  # type: ignore[return]
    quiet = torch.no_grad()
    with (
        contextlib.nullcontext(),
        torch.autocast("cpu", enabled=False),
        weft.stage(0),
        quiet,
        torch.enable_grad(),
    ):
        return positive(x)


def hooked(x: Tensor) -> Tensor:
    """Torch calls the forward of a module with hooks in a `try` that raises again."""
    layer = Checked()
    layer.register_forward_hook(lambda _layer, _args, result: result * 2)
    return layer(x)  # type: ignore[no-any-return]


CHECKED = [raised_again, in_a_handler, after_a_try, defined_in_a_try, with_an_else]
CHECKED += [in_a_loop, every_layer, at_its_end, in_a_finally, recomputed, in_contexts, hooked]


def training_loss(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(function(batch)).square().mean()

    return loss


@pytest.mark.parametrize("function", CHECKED, ids=lambda function: function.__name__)
def test_a_raise_that_nothing_catches_is_checked(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), training_loss(function)
    expected = plain_training(model, loss, [GOOD.double()] * 2)
    with pytest.raises(ValueError, match="negative"):
        loss(model, BAD.double())
    with compiled(model, loss, GOOD.double(), [0, 1], weft.data_parallel()) as program:
        assert_same_training(program, [GOOD.double()] * 2, expected)
        with pytest.raises(RankFailure, match=r"(?s)the step fails a check.*Error\(\"negative\"\)"):
            program.step(BAD.double())


class Bounded(nn.Module):
    """Layers of which each checks its input, in a region that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for at, layer in enumerate(self.layers):
            x = checkpoint(self.bounded, layer, x, batch["lowest"][:, at], use_reentrant=False)
        return x

    @staticmethod
    def bounded(layer: nn.Module, x: Tensor, lowest: Tensor) -> Tensor:
        if (x < lowest[:, None]).any():
            raise ValueError("below")
        return layer(x).sigmoid()  # type: ignore[no-any-return]


def test_every_layer_has_its_own_check() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, good = Bounded(), {"x": GOOD.double(), "lowest": torch.zeros(8, 3)}
    expected = plain_training(model, loss, [good] * 2)
    with compiled(model, loss, good, [0, 1], weft.data_parallel()) as program:
        assert_same_training(program, [good] * 2, expected)
    for at in range(3):
        bad = {**good, "lowest": good["lowest"].index_fill(1, torch.tensor([at]), 2.0)}
        with pytest.raises(ValueError, match="below"):
            loss(model, bad)
        with compiled(model, loss, good, [0], weft.Strategy()) as program:
            program.step(good)
            with pytest.raises(RankFailure, match="the step fails a check"):
                program.step(bad)


def test_an_evaluation_checks_too() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), training_loss(lambda x: x)

    def check(model: nn.Module, batch: Tensor) -> Tensor:
        return model(positive(batch))  # type: ignore[no-any-return]

    good, bad = GOOD.double(), BAD.double()
    with compiled(model, loss, good, [0, 1], weft.data_parallel()) as program:
        evaluation = program.evaluation(check, good)
        torch.testing.assert_close(evaluation.step(good), check(model, good))
        with pytest.raises(RankFailure, match="the step fails a check"):
            evaluation.step(bad)
