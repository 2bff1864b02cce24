"""`explain()` says on one screen what is sent, what for, how much is held, and what limits."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from models import GPT, GPT_COLUMNS, GPT_ROWS, token_batch, token_loss
from weft.boxing import EXCHANGES, steps
from weft.compiler.signatures import graph_halos
from weft.errors import UserError
from weft.ir.logical import Box, LogicalGraph
from weft.planning.exchanges import exchanges
from weft.program.inspect.details import box_times
from weft.units import ITEM_SIZE

STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": ([0, 1], weft.data_parallel()),
    "pipeline with ZeRO 3": (
        [[0, 1], [2, 3]],
        weft.Strategy(
            batch={"*": weft.split(0)},
            stages=2,
            micro_batches=4,
            zero=weft.Zero(3),
            clip_norm=1.0,
            recompute=["blocks.0"],
        ),
    ),
    "hybrid": ([[0, 1], [2, 3]], weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS, sequence=1)),
    "context": ([0, 1], weft.context_parallel()),
}


@pytest.fixture(autouse=True)
def _not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))


@contextmanager
def program(name: str, layers: int = 2) -> Iterator[weft.Program]:
    grid, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    model = GPT(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters())
    with weft.local_world(torch.tensor(grid).numel(), timeout=30):
        made = weft.compile(
            model,
            token_loss,
            optimizer,
            token_batch(8),
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )
        yield made
        made.close()


def line(text: str, start: str) -> str:
    """The one line that begins so."""
    (found,) = [each for each in text.splitlines() if each.strip().startswith(start)]
    return found.strip()


def sent_by(graph: LogicalGraph) -> int:
    """Bytes that boxing and border rows send in a step, node by node."""
    sent = sum(halo.total for halo, _ in graph_halos(graph))
    for node in graph.of_kind(Box):
        value = graph.values[node.input.name]
        chain = steps(value.laid, node.output.laid, value.shape, ITEM_SIZE[value.dtype])
        times = graph.micro_batches if node.output.name in graph.loop else 1
        sent += times * sum(step.bytes for step in chain if step.kind in EXCHANGES)
    return sent


@pytest.mark.parametrize("name", STRATEGIES)
def test_groups_are_all_that_is_sent(name: str) -> None:
    """No exchange is left out, counted twice, or without a group."""
    with program(name) as made:
        every = tuple(exchanges(made._core.compiled))
        assert sum(each.bytes for each in every) == sent_by(made.graph)
        text = made.explain()
        assert {each.group for each in every} == set(re.findall(r"^  ([a-z, ]+): \d", text, re.M))
        assert len(text.splitlines()) <= 25


def test_data_parallel_says_what_travels_and_why() -> None:
    with program("data", layers=5) as made:
        made.step(token_batch(8))
        text = made.explain()
        parameters = sum(each.numel() * 4 for each in made.full_state_dict().values())
        messages = re.search(r"joins into (\d+) messages", text)
    assert text.startswith("GPT, training step by AdamW on cpu [0, 1]\n")
    assert line(text, "strategy") == "strategy: data parallel over axis 0 (2 ranks)"
    # An all-reduce among 2 ranks: each sends what a parameter has, once.
    sent = f"gradients of parameters: {parameters / 1024:.1f} KiB (all_reduce ×"
    assert line(text, "gradients of").startswith(sent)
    assert messages is not None
    assert int(messages[1]) < 10
    # Five blocks, one line.
    assert re.search(
        r"\d+ %: all_reduce of aten.mm.default at \S*models.py:\d+ in blocks.\*.down \(backward\), .*, "
        r"wanted by update AdamW of blocks.\*.down.weight",
        text,
    )
    assert re.search(r"KiB as planned, measured [\d.]+ KiB; .*states [\d.]+ KiB \(\d+ %\)", text)
    assert re.search(
        r"limited by \w+, as estimated \(usual devices\): [\d.]+ ms of computing", text
    )
    assert "proven cheapest" in line(text, "layouts")


def test_a_pipeline_says_its_stages_and_idle_time() -> None:
    with program("pipeline with ZeRO 3") as made:
        text = made.explain()
    strategy = line(text, "strategy")
    assert strategy == (
        "strategy: data parallel over axis 1 (2 ranks), ZeRO 3 over axis 1, 2 stages × 4 micro-batches, "
        "schedule computed, recompute blocks.0, gradients clipped to norm 1"
    )
    # A micro-batch there and its gradient back, to and from each of two pairs of ranks.
    assert "transfer ×8" in line(text, "between stages")
    assert "all_gather" in line(text, "parameters gathered")
    assert re.search(r"all_gather of parameter \S+, wanted by aten\.\S+ at", text)
    assert "weft.hint" not in text  # behind which the reader is
    assert "reduce_scatter" in line(text, "gradients of parameters")
    assert re.search(r"nothing to compute for \d+ (to \d+ )?% of the time", text)
    assert line(text, "note") == (
        "note: zero: axis 0 has one rank in each stage; parameters are sharded along axis 1"
    )


def test_tensor_and_context_parallel_in_words() -> None:
    with program("hybrid") as made:
        words = line(made.explain(), "strategy")
    assert words == (
        "strategy: data parallel over axis 0 (2 ranks), 12 of 29 parameters split over axis 1 (2 ranks)"
    )
    with program("context") as made:
        words = line(made.explain(), "strategy")
    assert words == "strategy: dimension 1 of the batch over axis 0 (2 ranks)"


def test_notes_are_few() -> None:
    """Parameters that stay whole are told, equal blocks once; the tables have each."""
    with program("data") as made:
        notes = tuple(
            f"zero: blocks.{n}.{name} stays as it is: so" for n in range(3) for name in "abcdef"
        )
        object.__setattr__(made._core.compiled, "notes", notes)
        text = made.explain()
        assert all(note in made.explain(details=True) for note in notes)
    assert "note: zero: blocks.*.a stays as it is: so (×3)" in text
    assert text.count("note: ") == 4
    assert "… and 2 more notes" in text


def test_evaluation() -> None:
    with program("data") as made:
        text = made.evaluation(token_loss, token_batch(8)).explain()
    assert text.startswith("GPT, evaluation on cpu [0, 1]\n")
    assert "gradients of" not in text


def test_rows_of_an_op() -> None:
    with program("data") as made:
        text = made.explain(op="blocks.1.up")
        assert "blocks.*.down" not in text
        assert re.search(r"parameter +blocks.\*.up.weight", text)
        assert re.search(r"aten.addmm.default .* in blocks.\*.up\n", text)
        assert re.search(r"all_reduce .* update AdamW of blocks.\*.up.weight", text)
        assert "aten.mm.default" in made.explain(op="aten.mm.*")
        assert "head.weight" in made.explain(op="head.weight")
        place = re.search(r"models.py:\d+", text)
        assert place is not None
        assert "in blocks.*.up" in made.explain(op=place[0])
        with pytest.raises(UserError, match=r"explain\(op='blocks.7'\): no op's module"):
            made.explain(op="blocks.7")
        with pytest.raises(UserError, match="op= as a pattern .*got details=False, op=7"):
            made.explain(op=7)
        with pytest.raises(UserError, match="details=True or False, .*got details='x'"):
            made.explain(details="x")
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UserError, match=r"cannot be copied or pickled.*program\.save"):
                copied(made)
        with pytest.raises(UserError, match="tensors by name, .*got None"):
            made.load_full_state_dict(None)
        names = dict.fromkeys(made.full_state_dict(), "x")
        with pytest.raises(UserError, match="is a tensor, the state holds 'x'"):
            made.load_full_state_dict(names)


@pytest.mark.parametrize("name", ["data", "pipeline with ZeRO 3"])
def test_times_stand_as_predicted_and_as_measured(name: str) -> None:
    """Every boxing that this rank takes part in has both; what travels together shares the time of its message."""
    with program(name) as made:
        assert line(made.explain(), "step").endswith(
            "predicted (about: figures are missing), none measured yet"
        )
        made.step(token_batch(8))
        text = line(made.explain(), "step")
        assert re.search(r"[\d.]+ ms predicted .*, [\d.]+ m?s measured, the last one", text)
        tables = made.explain(details=True)
        plan, record = made.plan.ranks[0], made._record()[1]
        times = box_times(made._core.compiled, plan, made.predicted, record)
    rows = tables.split("\nboxing\n")[1].split(" kinds, ")[0]
    assert rows.splitlines()[0].split()[-2:] == ["predicted", "measured"]
    boxed = {node.output.name for node in made.graph.of_kind(Box)}
    assert set(times.predicted) == set(times.measured)
    assert set(times.predicted) <= boxed
    queues = {actor.id: actor.queue for actor in plan.actors}
    spans = [s for s in record.spans if queues[s[0].actor].startswith("comm")]
    assert sum(times.measured.values()) == pytest.approx(sum(s[2] - s[1] for s in spans) / 1e9)
    # Of ranks that are alike, the first one has been simulated.
    for own in (trace for trace in made.predicted.traces if trace.rank == plan.rank):
        moved = sum(s.end - s.begin for s in own.slices if s.queue.startswith("comm"))
        assert sum(times.predicted.values()) == pytest.approx(moved / 1e9)
