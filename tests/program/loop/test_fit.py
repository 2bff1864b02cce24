"""The loop: how it ends, what it keeps and writes, and that it trains as a loop by hand does."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.data.datasets import Drawn, example, loss_fn, net
from weft.errors import UserError

pytestmark = pytest.mark.one_process_outside("rank 0 logs")

SIZE = 10  # five batches an epoch


@contextmanager
def compiled(ranks: int = 2) -> Iterator[tuple[weft.Program, torch.optim.Optimizer]]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with weft.local_world(ranks):
        program = weft.compile(
            *(model, loss_fn, optimizer, example(SIZE)),
            placement=weft.placement("cpu", list(range(ranks))),
        )
        yield program, optimizer
        program.close()


def loader(program: weft.Program) -> weft.Loader:
    return weft.Loader(Drawn(), SIZE, program, shuffle=True)


def plainly(steps: int, accumulate: int = 1) -> list[float]:
    """Losses of plain PyTorch, with a schedule."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    batches = weft.Loader(Drawn(), SIZE, shuffle=True)
    losses: list[Any] = []
    while len(losses) < steps:
        for number, batch in enumerate(batches, 1):
            loss = loss_fn(model, batch)
            loss.backward()
            losses.append(loss.item())
            if number % accumulate == 0 or number == 5:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return losses[:steps]


def seen(found: dict[int, float]) -> Any:
    return lambda step, figures: found.setdefault(step, figures.get("loss"))


def test_it_trains_as_a_loop_by_hand() -> None:
    found: dict[int, float] = {}
    with compiled() as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        ended = weft.fit(
            *(program, loader(program)),
            steps=12,
            schedulers=[schedule],
            log=[seen(found)],
            log_every=1,
        )
    assert (ended.steps, ended.why) == (12, "steps")
    assert list(found) == list(range(1, 13))
    assert list(found.values()) == pytest.approx(plainly(12), rel=1e-12)
    assert ended.figures["loss"] == found[12]
    assert ended.figures["samples_per_second"] > ended.figures["steps_per_second"] > 0


@pytest.mark.parametrize("cut", [3, 5, 7])
def test_it_goes_on_after_it_was_ended(cut: int, tmp_path: Path) -> None:
    """As if it had never been, on another number of ranks."""
    found: dict[int, float] = {}
    kept = weft.Checkpoints(tmp_path / "run", every=4)
    for ranks, steps in ((2, cut), (3, 12)):
        with compiled(ranks) as (program, optimizer):
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            weft.fit(
                *(program, loader(program)),
                steps=steps,
                checkpoint=kept,
                schedulers=[schedule],
                log=[seen(found)],
                log_every=1,
            )
    assert list(found) == list(range(1, 13))
    assert list(found.values()) == pytest.approx(plainly(12), rel=1e-12)
    assert [int(each.name[5:]) for each in kept.all()] == (
        [7, 8, 12] if cut == 7 else [4, 8, 12] if cut == 3 else [5, 8, 12]
    )


def test_the_checkpoint_of_the_least_figure_stays(tmp_path: Path) -> None:
    scores = iter([3.0, 1.0, 2.0, 4.0])
    kept = weft.Checkpoints(tmp_path, every=3, keep=1, score="held_out")
    with compiled() as (program, _):
        weft.fit(
            *(program, loader(program)),
            steps=12,
            evaluate=lambda: {"held_out": next(scores)},
            evaluate_every=3,
            checkpoint=kept,
        )
    assert [each.name for each in kept.all()] == ["step-00000006", "step-00000012"]


def test_the_best_is_that_of_the_figures_of_its_step(tmp_path: Path) -> None:
    """Evaluated after each epoch of five batches, also where the checkpoint of its last step was written before."""
    scores = iter([5.0, 1.0, 9.0, 7.0])
    kept = weft.Checkpoints(tmp_path, every=5, keep=1, score="held_out")
    with compiled() as (program, _):
        weft.fit(
            *(program, loader(program)),
            epochs=4,
            evaluate=lambda: {"held_out": next(scores)},
            checkpoint=kept,
        )
    assert [each.name for each in kept.all()] == ["step-00000010", "step-00000020"]


def test_it_returns_once_the_last_checkpoint_is_written(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, wait=False)
    with compiled() as (program, _):
        weft.fit(program, loader(program), steps=2, checkpoint=kept)
        assert [each.name for each in kept.all()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("score", "every", "told"), [("held_out", 3, 0), ("held_uot", 3, 1), ("held_out", 4, 1)]
)
def test_a_score_that_no_checkpoint_has_is_told(
    score: str, every: int, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a name that is no figure, or an evaluation after other steps; once."""
    with compiled(1) as (program, _):
        weft.fit(
            *(program, loader(program)),
            steps=11,
            evaluate=lambda: {"held_out": 1.0},
            evaluate_every=3,
            checkpoint=weft.Checkpoints(tmp_path, every=every, keep=1, score=score),
        )
    warned = [each.message for each in caplog.records if "has a score" in each.message]
    assert len(warned) == told
    assert all(score in text and "held_out" in text for text in warned)


def test_a_loader_may_have_an_epoch_of_its_own() -> None:
    class Own:
        epoch = None

        def __iter__(self) -> Iterator[Any]:
            return iter(list(weft.Loader(Drawn(), SIZE)))

    with compiled() as (program, _):
        assert weft.fit(program, Own(), epochs=2).steps == 10


def test_epochs_and_evaluation() -> None:
    found: list[tuple[int, dict[str, float]]] = []
    with compiled() as (program, _):
        ended = weft.fit(
            *(program, loader(program)),
            epochs=2,
            evaluate=lambda: {"accuracy": 0.5},
            log=[lambda step, figures: found.append((step, dict(figures)))],
            log_every=100,
        )
    assert (ended.steps, ended.why) == (10, "epochs")
    assert [(step, each.get("accuracy")) for step, each in found] == [(5, 0.5), (10, 0.5)]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"steps": 7}, [5, 7]),
        ({"steps": 5}, [5]),
        ({"steps": 7, "evaluate_every": 3}, [3, 6, 7]),
        ({"steps": 6, "evaluate_every": 3}, [3, 6]),
        ({"steps": 50, "log_every": 1, "stop": lambda step, _: step == 2}, [2]),
    ],
)
def test_there_is_an_evaluation_at_the_end(arguments: dict[str, Any], steps: list[int]) -> None:
    found: list[int] = []
    with compiled() as (program, _):

        def evaluate() -> dict[str, float]:
            found.append(program.steps)
            return {"accuracy": float(program.steps)}

        ended = weft.fit(program, loader(program), evaluate=evaluate, **arguments)
    assert found == steps
    assert ended.figures["accuracy"] == steps[-1]


def test_what_is_due_between_updates_is_done_after_them(tmp_path: Path) -> None:
    found: dict[int, float] = {}
    kept = weft.Checkpoints(tmp_path / "run", every=4, keep=9)
    with compiled() as (program, _):
        weft.fit(
            *(program, loader(program)),
            epochs=4,
            accumulate=3,
            log=[seen(found)],
            log_every=4,
            checkpoint=kept,
        )
        # Nothing is left to do, and that is no error.
        again = weft.fit(program, loader(program), steps=20, checkpoint=kept)
    assert again.steps == 20
    assert [int(each.name.removeprefix("step-")) for each in kept.all()] == [5, 8, 13, 18, 20]
    assert list(found) == [5, 8, 13, 18, 20]


def test_what_is_no_number_is_null_in_lines(tmp_path: Path) -> None:
    log = weft.logs.JsonLines(tmp_path / "run.jsonl")
    log.write(1, {"loss": float("nan"), "rate": 0.5})
    log.close()
    assert json.loads((tmp_path / "run.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "rate": 0.5,
    }


def test_extras_and_logs_go_on_in_another_loop(tmp_path: Path) -> None:
    log, kept = weft.logs.JsonLines(tmp_path / "log"), weft.Checkpoints(tmp_path / "run", every=2)
    for steps in (2, 4):
        with compiled() as (program, _):
            weft.fit(
                *(program, loader(program)),
                steps=steps,
                extra={"note": "plain"},
                checkpoint=kept,
                log=[log],
                log_every=1,
            )
    assert len((tmp_path / "log").read_text().splitlines()) == 4


def test_an_evaluation_that_gives_no_numbers_is_told() -> None:
    with compiled() as (program, _), pytest.raises(UserError, match="evaluate must return"):
        weft.fit(program, loader(program), steps=1, evaluate=lambda: {"a": "x"})


def test_a_loader_without_batches_is_told() -> None:
    with compiled() as (program, _), pytest.raises(UserError, match="gives no batches"):
        weft.fit(program, [], steps=3)


def test_a_scheduler_that_follows_a_figure_is_refused() -> None:
    with compiled() as (program, optimizer):
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        with pytest.raises(UserError, match="got a value of type ReduceLROnPlateau; step one that"):
            weft.fit(program, loader(program), steps=3, schedulers=[schedule])


def test_an_extra_that_is_called_as_a_scheduler_is_refused() -> None:
    with compiled() as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        with pytest.raises(UserError, match=r"'scheduler\.0'; give yours another name"):
            weft.fit(
                *(program, loader(program)),
                steps=1,
                schedulers=[schedule],
                extra={"scheduler.0": 1},
            )


def test_several_batches_an_update() -> None:
    found: dict[int, float] = {}
    with compiled() as (program, optimizer):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        weft.fit(
            *(program, loader(program)),
            epochs=2,
            accumulate=2,
            schedulers=[schedule],
            log=[seen(found)],
            log_every=1,
        )
    expected = plainly(10, accumulate=2)
    assert list(found) == [2, 4, 5, 7, 9, 10]
    for before, (step, loss) in zip([0, *found], found.items(), strict=False):
        assert loss == pytest.approx(sum(expected[before:step]) / (step - before), rel=1e-12)
    assert list(found) == [2, 4, 5, 7, 9, 10]


def test_the_users_function_ends_it() -> None:
    with compiled() as (program, _):
        ended = weft.fit(
            program, loader(program), steps=50, log_every=2, stop=lambda step, _: step >= 6
        )
    assert (ended.steps, ended.why) == (6, "stop")


@pytest.mark.one_process("rank 0 alone is sent the signal; test_fit_on_processes.py has others")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_it_with_a_checkpoint(number: signal.Signals, tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path / "run", every=100)

    def end(step: int, _: Any) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with compiled() as (program, _):
        ended = weft.fit(
            program, loader(program), steps=50, checkpoint=kept, log=[end], log_every=1
        )
    assert ended.why == number.name
    assert 3 <= ended.steps <= 4
    assert [each.name for each in kept.all()] == [f"step-{ended.steps:08d}"]
    assert signal.getsignal(number) is before


def test_signals_of_the_users_are_left_to_them(tmp_path: Path) -> None:
    came: list[int] = []

    def raise_both(step: int, _: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    with (tmp_path / "places").open("w+") as places:
        faulthandler.register(signal.SIGUSR2, places)
        try:
            with compiled() as (program, _):
                ended = weft.fit(program, loader(program), steps=2, log=[raise_both], log_every=2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            signal.signal(signal.SIGUSR1, before)
        places.seek(0)
        assert "raise_both" in places.read()
    assert (ended.why, came) == ("steps", [signal.SIGUSR1])


@pytest.mark.one_process("rank 0 alone is sent the signal; test_fit_on_processes.py has others")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_only_ctrl_c_hurries_a_loop_that_ends(first: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM comes twice where a scheduler sends it to ranks and launcher alike."""
    kept, sent = weft.Checkpoints(tmp_path / "run", every=100), [first, signal.SIGTERM]

    def end(step: int, _: Any) -> None:
        for number in sent if step == 3 else ():
            os.kill(os.getpid(), number)

    with compiled() as (program, _):
        ended = weft.fit(
            program, loader(program), steps=50, checkpoint=kept, log=[end], log_every=1
        )
        assert (ended.why, len(kept.all())) == (first.name, 1)
    sent[1:] = [signal.SIGINT]
    with compiled() as (program, _), pytest.raises(KeyboardInterrupt):
        weft.fit(program, loader(program), steps=50, log=[end], log_every=1)


def test_logs(tmp_path: Path) -> None:
    lines, told = tmp_path / "a" / "run.jsonl", dict[int, float]()
    for steps in (2, 4):
        with compiled() as (program, _):
            program.step(example(SIZE))
            logs = [weft.logs.JsonLines(lines), seen(told)]
            weft.fit(program, loader(program), steps=steps, log=logs, log_every=1)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {each["step"]: each["loss"] for each in found} == told
    assert list(told) == [2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "give steps or epochs"),
        ({"steps": 0}, "steps must be a number from 1, got 0"),
        ({"epochs": 1.5}, "epochs must be a number"),
        ({"steps": 1, "accumulate": 0}, "accumulate must be"),
        ({"steps": 1, "log_every": True}, "log_every must be"),
        ({"steps": 1, "log": [3]}, "log must be logs"),
        ({"steps": 1, "extra": {"loader": 1}}, "give yours another name"),
        (
            {"steps": 1, "extra": {"score": 1}, "checkpoint": weft.Checkpoints("nowhere")},
            "'score'; give yours another name",
        ),
        ({"steps": 1, "extra": [1]}, "extra must be a dict"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with compiled() as (program, _), pytest.raises(UserError, match=text):
        weft.fit(program, loader(program), **arguments)


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("batches", [2, 3])
def test_epochs_of_any_loader_are_counted_over_runs(
    every: int, batches: int, tmp_path: Path
) -> None:
    found = []
    for epochs in (1, 2, 2, 3):
        with compiled() as (program, _):
            ended = weft.fit(
                *(program, [example(SIZE)] * batches),
                epochs=epochs,
                checkpoint=weft.Checkpoints(tmp_path, every=every),
            )
            found.append(ended.steps)
    assert found == [batches * epochs for epochs in (1, 2, 2, 3)]


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = weft.Checkpoints(tmp_path / "file" / "run")
    with compiled() as (program, _):
        with pytest.raises(UserError, match="cannot write a checkpoint at .*Not a directory"):
            weft.fit(program, loader(program), steps=2, checkpoint=kept)
        assert program.steps == 0
        weft.fit(program, loader(program), steps=1, checkpoint=weft.Checkpoints(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]


def test_a_log_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good, bad = (weft.logs.JsonLines(tmp_path / name / "log") for name in ("a", "file"))
    with compiled() as (program, _):
        with pytest.raises(UserError, match="cannot write the log .*(Not a directory|File exists)"):
            weft.fit(program, loader(program), steps=2, log=[good, bad])
        assert program.steps == 0
        weft.fit(program, loader(program), steps=1, log=[good], log_every=1)
    assert "loss" in (tmp_path / "a" / "log").read_text()


@pytest.mark.one_process("rank 0 alone logs, and fails")
def test_logs_are_told_that_the_loop_has_failed() -> None:
    told: list[str] = []

    class Told:
        def write(self, step: int, figures: weft.logs.Figures) -> None:
            if step == 2 and len(told) == 0:
                raise OSError("as if the disk were full")

        def close(self) -> None:
            told.append("closed")

        def fail(self) -> None:
            told.append("failed")

    with compiled() as (program, _):
        with pytest.raises(OSError, match="as if"):
            weft.fit(program, loader(program), steps=2, log=[Told()], log_every=1)
        weft.fit(program, loader(program), steps=3, log=[Told()], log_every=1)
    assert told == ["failed", "closed"]
