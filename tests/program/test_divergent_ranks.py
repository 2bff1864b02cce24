"""Ranks that do not do the same are told at once, on real processes: what differs, and where they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from on_ranks import passed
from program import divergent_on_processes as script

# Seconds for all pairs of processes, which the first test waits for.
LIMIT = 560
pytestmark = pytest.mark.timeout(LIMIT + 20)
SCRIPT = Path(__file__).with_name("divergent_on_processes.py")
# The line of the loss.
LINE = 1 + SCRIPT.read_text()[: SCRIPT.read_text().index(".square().mean()")].count("\n")
AS_NCCL = {case.__name__ for case in script.AS_NCCL}


# What each case differs in, and the words by which both ranks are told.
TABLE: list[tuple[str, list[str]]] = [
    ("rates", ["different hyperparameters"]),
    ("numbers", ["numbers of Python or tensors outside the model that the step reads"]),
    ("other_outside", ["tensors outside the model that the step reads"]),
    ("written_outside", ["tensors outside the model that the step reads"]),
    ("written_outside_by_numpy", ["tensors outside the model that the step reads"]),
    ("updates", ["different hyperparameters", "update=False"]),
    ("other_batch", ["different batches", 'batch="local"', "weft.from_local"]),
    ("other_seed_of_a_loader", ["different samples next", "same seed, sampler"]),
    ("one_label", ["different batches"]),
    ("long_batch", ["different batches"]),
    ("other_weights", ["other values into the live model"]),
    ("loaded_alone", ["other values into the live model"]),
    ("other_whole_state", ["other values into the live model"]),
    ("other_states", ["other values into the live model"]),
    ("cleared_states", ["other values into the live model"]),
    ("popped_states", ["other values into the live model"]),
    ("deleted_state", ["other values into the live model"]),
    ("other_rate_of_update", ["different calls", "options"]),
    ("other_tensor_rates", ["different hyperparameters"]),
    ("adds_alone", ["different calls", "plan of steps that add"]),
    ("own_rows_of_tensor_ranks", ["different batches", "along an axis that does not split"]),
    ("skipped", ["step 3 on x", "full_state_dict of program 1", SCRIPT.name]),
    ("other_shape", ["step 3 on x float32[4, 4]", "step 3 on x float32[2, 4]", SCRIPT.name]),
    (
        "two_programs",
        ["step 0 on x float32[4, 4]", "of program 1", "of program 2", SCRIPT.name],
    ),
    ("forgotten", ["0.weight would be laid out as (B)", "another program that is open"]),
    ("kept_loss", ["rank 1: ", "cannot be moved to the program, as an autograd graph needs"]),
    ("released_open", ["rank 1: weft.release: an open program works with 0.weight"]),
    ("recovery_alone", ["different calls", "in recovery of program", "in compile"]),
    ("whole_beside_compile", ["different calls", "in full_state_dict of program 1", "in compile"]),
    ("too_long", ["rank 1: batch leaf x has length 20, the longest of weft.Buckets is 16"]),
    (
        "other_examples",
        ["int64[4, 8] on rank 0", "int64[4, 16] on rank 1", "padded to the same length"],
    ),
    ("captured_alone", ["rank 1: ", "loss.item()", "values in a tensor"]),
    ("asked_alone", ["rank 1: ", "metrics= must be names among"]),
    ("other_micro_batches", ["strategy.micro_batches is 2 on rank 0, and 4 on rank 1"]),
    ("other_placement", ["placement is cpu [0, 1] on rank 0, and cpu [[0, 1]] on rank 1"]),
    ("other_version", ["torch is '2.11.0' on rank 0, and '2.12.0' on rank 1"]),
    ("other_strategy", ["strategy.parameters is {'0.*': 'B'} on rank 0, and {'0.*': 'S(0)'}"]),
    (
        "other_option",
        ["option amsgrad of parameter group 0 of Adam is False on rank 0, and True on rank 1"],
    ),
    (
        "other_groups",
        ["group 0 of Adam is 0.weight, 0.bias on rank 0, and 2.weight, 2.bias on"],
    ),
    ("frozen_alone", ["0.weight is float32[8, 4], trained on rank 0, and float32[8, 4], not"]),
    ("other_width", ["0.weight is float32[8, 4], trained on rank 0, and float32[9, 4], tra"]),
    ("other_batch_at_compile", ["leaf x is a tensor float32[4, 4] on rank 0, and a tensor"]),
    ("other_loss", ["aten.div.Tensor with 4", f"{SCRIPT.name}:{LINE} on rank 0", "on rank 1"]),
    ("other_number", ["aten.mul", "2", "3", SCRIPT.name, "on rank 1"]),
    ("without_loss", ["rank 1: ", "weft.compile takes a model, loss_fn"]),
    ("misnamed_alone", ["strategy.parameters is", "1.weight", "on rank 1"]),
    ("state_of_one", ["rank 1: ", "0.weight.momentum_buffer of shape [4, 8]"]),
    ("filled_alone", ["no weights for this layer"]),
    ("started_alone", ["no room for kernels"]),
    ("other_shape_alone", ["rank 1: ", "loss.item()"]),
    ("evaluated_alone", ["rank 1: ", "loss.item()"]),
    ("held_alone", ["rank 1: ", "loss.item()"]),
    ("eager_alone", ["to_global: float32[4] as (P(sum))", "step 3 on x"]),
    ("first_use_alone", ["the first use of global tensors on", "step 3 on x"]),
    ("seeded_alone", ["the first draw from a seed", "step 3 on x"]),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Any:
    """Of all cases, but for those of parametrized tests that were not collected."""
    forms = {
        test_both_ranks_are_told: "",
        test_both_ranks_are_told_over_a_network: " over gloo",
        test_both_ranks_are_told_as_between_gpus: " as nccl",
    }
    cases = {
        f"{case}{form}" for test, form in forms.items() for case, _ in test.pytestmark[0].args[1]
    }
    asked = {
        item.callspec.params["case"] + forms[item.function]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function in forms
    }
    command = [sys.executable, str(SCRIPT), "--without", *sorted(cases - asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("case", "words"), TABLE)
def test_both_ranks_are_told(outcomes: Any, case: str, words: list[str]) -> None:
    for seconds, error, _ in outcomes[case].values():
        assert all(word in error for word in words), error
        assert seconds < 60  # with compiling; without being told it would be 300


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rates", ["different hyperparameters"]),
        ("other_batch", ["different batches", 'batch="local"']),
        ("skipped", ["step 3 on x", "full_state_dict of program 1", SCRIPT.name]),
        ("eager_alone", ["to_global: float32[4] as (P(sum))", "step 3 on x", SCRIPT.name]),
        ("first_use_alone", ["the first use of global tensors on", "step 3 on x", SCRIPT.name]),
    ],
)
def test_both_ranks_are_told_over_a_network(outcomes: Any, case: str, words: list[str]) -> None:
    found = outcomes[f"{case} over gloo"]
    assert found.keys() == {"0", "1"}
    for seconds, error, _ in found.values():
        assert all(word in error for word in words), error
        assert seconds < 60


@pytest.mark.parametrize(("case", "words"), [row for row in TABLE if row[0] in AS_NCCL])
def test_both_ranks_are_told_as_between_gpus(outcomes: Any, case: str, words: list[str]) -> None:
    found = outcomes[f"{case} as nccl"]
    assert found.keys() == {"0", "1"}
    for seconds, error, _ in found.values():
        assert all(word in error for word in words), error
        assert seconds < 60


def test_ranks_as_between_gpus_that_are_alike_go_on(outcomes: Any) -> None:
    for case in ("two_steps", "other_weights_put_right"):
        (_, error, loss), (_, other, same) = outcomes[f"{case} as nccl"].values()
        assert (error, other) == ("", "")
        assert loss == same == outcomes[case]["0"][2] > 0


def test_no_rank_as_between_gpus_makes_a_step_that_another_does_otherwise() -> None:
    passed(Path(__file__).with_name("odd_rank_on_processes.py"), 4, seconds=100)


def test_a_rank_that_has_ended_is_told_of(outcomes: Any) -> None:
    _, error, _ = outcomes["state_alone"]["0"]
    assert "ended early" in error
    assert "rank 0 is in full_state_dict of program 1" in error
    assert "rank 1 was last in step 2 on x" in error


@pytest.mark.parametrize("case", ["eager_late", "eager_late over gloo"])
def test_a_rank_that_is_late_in_eager_code_is_waited_for(outcomes: Any, case: str) -> None:
    (_, error, loss), (_, other, same) = outcomes[case].values()
    assert (error, other) == ("", "")
    assert loss == same > 0


def test_eager_code_after_a_failure_is_compared_anew(outcomes: Any) -> None:
    for _, error, found in outcomes["other_ops_put_right"].values():
        assert (error, found) == ("", 4)


def test_ranks_go_on_after_one_was_interrupted(outcomes: Any) -> None:
    for (_, error, loss), (_, _, alike) in zip(
        outcomes["interrupted"].values(), outcomes["two_steps"].values(), strict=True
    ):
        assert error == ""
        assert loss == alike > 0


@pytest.mark.parametrize("case", ["forked", "forked over gloo"])
def test_a_process_that_is_forked_from_a_rank_is_told(outcomes: Any, case: str) -> None:
    assert outcomes[case].keys() == {"0", "1"}
    for _, error, told in outcomes[case].values():
        assert (error, told) == ("", 8)


def test_ranks_that_were_told_go_on_when_they_are_alike(outcomes: Any) -> None:
    (_, error, loss), (_, other, same) = outcomes["other_weights_put_right"].values()
    assert (error, other) == ("", "")
    assert loss == same > 0


def test_each_process_brings_its_own_rows(outcomes: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = torch.randn(10, 4), torch.randn(10, 1)

    def loss(count: int) -> torch.Tensor:
        result: torch.Tensor = (model(x[:count]) - y[:count]).square().mean()
        return result

    for count in (10, 6, 10):
        optimizer.zero_grad()
        loss(count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for _, error, found in outcomes["own_rows"].values():
        assert error == ""
        assert found == pytest.approx(loss(10).item(), rel=1e-5)


def test_a_program_that_one_rank_has_forgotten_counts_for_all(outcomes: Any) -> None:
    model = script.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = script.squares(model, script.pairs())
        loss.backward()
        optimizer.step()
    for _, error, found in outcomes["forgotten_alike"].values():
        assert error == ""
        assert found == pytest.approx(loss.item(), rel=1e-5)


def test_rows_of_each_process_are_padded_to_the_same_length(outcomes: Any) -> None:
    model = script.Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for lengths in script.LENGTHS:
        rows = [script.tags(rank, length) for rank, length in enumerate(lengths)]
        found = torch.cat([model(each["x"]).flatten(0, 1) for each in rows])
        loss = nn.functional.cross_entropy(found, torch.cat([each["y"].flatten() for each in rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for _, error, last in outcomes["own_lengths"].values():
        assert error == ""
        assert last == pytest.approx(loss.item(), rel=1e-5)


def test_a_refused_compile_leaves_data_parallel_training_as_it_was(outcomes: Any) -> None:
    model = script.mlp()
    for rank in range(2):
        moved = {name: leaf + rank for name, leaf in script.pairs().items()}
        (script.squares(model, moved) / 2).backward()
    for _, error, found in outcomes["falls_back"].values():
        assert error == ""
        assert found == pytest.approx(model[0].weight.grad.sum().item(), rel=1e-5)


def test_eager_optimizers_update_stages_of_other_processes(outcomes: Any) -> None:
    for _, error, worst in outcomes["staged_updates"].values():
        assert error == ""
        assert worst < 1e-9
