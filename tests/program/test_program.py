"""What a program offers besides training: evaluation, state, other outputs, hints, batches in parts, explanations."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import GPT, MLP, ResNet, classification_loss, image_batch, token_loss, vector_batch
from single_device import adamw, assert_same_state, whole, whole_state
from weft.errors import BatchError, UserError
from weft.ir import parse_graph, parse_plan

PAIR = weft.placement("cpu", [0, 1])
S, B = weft.split, weft.broadcast


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(model: nn.Module, **changes: Any) -> weft.Program:
    arguments: dict[str, Any] = {
        "loss_fn": classification_loss,
        "optimizer": sgd(model) if list(model.parameters()) else None,
        "example_batch": vector_batch(8),
        "placement": PAIR,
    }
    return weft.compile(model, **{**arguments, **changes})


def test_the_users_model_and_optimizer_are_trained() -> None:
    model = MLP().double()
    optimizer = adamw(model)
    plain, other = copy.deepcopy((model, optimizer))
    objects = dict(model.named_parameters())
    with weft.local_world(2):
        program = compiled(model, optimizer=optimizer)
        for seed in range(3):
            program.step(vector_batch(8, seed=seed))
            other.zero_grad()
            classification_loss(plain, vector_batch(8, seed=seed)).backward()
            other.step()
    assert all(objects[name] is parameter for name, parameter in model.named_parameters())
    assert_same_state(whole_state(model), plain.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [*map(id, optimizer.state)] == [*map(id, model.parameters())]
    for name, parameter in plain.named_parameters():
        found = {key: whole(x) for key, x in optimizer.state[objects[name]].items()}
        assert_same_state(found, other.state[parameter])


def test_evaluation_reads_the_live_parameters_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = ResNet().double()
    plain = copy.deepcopy(model)
    batch = image_batch(4)

    def predictions(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {
            "logits": model(batch["x"]),
            "right": (model(batch["x"]).argmax(1) == batch["y"]).sum(),
        }

    optimizer = sgd(plain)
    with weft.local_world(2):
        program = compiled(model, loss_fn=classification_loss, example_batch=batch)
        evaluation = program.evaluation(predictions, batch)
        for seed in range(2):
            program.step(image_batch(4, seed=seed))
            plain.train()
            optimizer.zero_grad()
            classification_loss(plain, image_batch(4, seed=seed)).backward()
            optimizer.step()
            plain.eval()
            found = evaluation.step(batch)
            torch.testing.assert_close(found["logits"], plain(batch["x"]), rtol=1e-9, atol=1e-9)
            assert found["right"].dtype == torch.int64
    assert model.training


class LooksAtItsMode(MLP):
    """As models of `transformers` do: `train` reads the mode that there was."""

    def train(self, mode: bool = True) -> nn.Module:
        self.switched = getattr(self, "training", None) != mode
        return super().train(mode)


def test_a_model_that_looks_at_its_mode_is_evaluated() -> None:
    torch.manual_seed(0)
    model, batch = LooksAtItsMode(dropout=0.5).double(), vector_batch(8)
    expected = copy.deepcopy(model).eval()(batch["x"])
    with weft.local_world(2):
        program = compiled(model)
        evaluation = program.evaluation(lambda model, batch: model(batch["x"]), batch)
        torch.testing.assert_close(evaluation.step(batch), expected)
        assert model.training
        program.close()


def test_full_state_can_be_loaded_again() -> None:
    batch = vector_batch(8)
    with weft.local_world(2):
        first, second = compiled(MLP().double()), compiled(MLP().double())
        assert first.step(batch) != second.step(batch)
        second.load_full_state_dict(first.full_state_dict())
        assert torch.equal(first.step(batch), second.step(batch))
        state = first.full_state_dict()
        state["head.weight"] = state["head.weight"][:2]
        with pytest.raises(
            UserError, match=r"head.weight has shape \[4, 16\], the state holds \[2, 16\]"
        ):
            second.load_full_state_dict(state)
        del state["head.weight"]
        with pytest.raises(UserError, match=r"lacks .*head\.weight"):
            second.load_full_state_dict(state)


def test_tied_parameters_keep_both_names() -> None:
    model = GPT(tied=True)
    tokens = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    with weft.local_world(2):
        state = compiled(model, loss_fn=token_loss, example_batch=tokens).full_state_dict()
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state)


def test_what_the_loss_function_returns_comes_back_whole() -> None:
    torch.manual_seed(0)
    model = MLP().double()
    batch = vector_batch(8)

    def with_extras(model: nn.Module, batch: Any) -> dict[str, Any]:
        logits = model(batch["x"])
        return {
            "loss": F.cross_entropy(logits, batch["y"]),
            "seen": [logits, logits.argmax(1)],
            "n": 8,
        }

    with torch.no_grad():
        expected = with_extras(model, batch)
    with weft.local_world(2):
        found = compiled(model, loss_fn=with_extras).step(batch)
    assert found["n"] == 8
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["seen"][0], expected["seen"][0])
    assert torch.equal(found["seen"][1], expected["seen"][1])


def test_a_batch_may_come_in_parts() -> None:
    model, batch = MLP().double(), vector_batch(8)
    again = copy.deepcopy(model)
    with weft.local_world(2):
        program = compiled(model)
        parts = {
            key: weft.from_local({0: tensor[:4], 1: tensor[4:]}, placement=PAIR, sbp=S(0))
            for key, tensor in batch.items()
        }
        twin = compiled(again, example_batch=parts)
        assert torch.equal(program.step(parts), twin.step(batch))
        other = weft.from_local({0: batch["x"], 1: batch["x"]}, placement=PAIR, sbp=B)
        with pytest.raises(BatchError, match="batch leaf x is laid out as"):
            program.step({**batch, "x": other})


@pytest.mark.one_process("a process with one rank may give its part alone")
def test_parts_of_several_ranks_are_given_by_rank() -> None:
    with weft.local_world(2), pytest.raises(UserError, match=r"takes \{rank: part\}"):
        weft.from_local(torch.ones(4), placement=PAIR, sbp=S(0))


def test_hints_in_the_models_code() -> None:
    class Hinted(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = weft.hint(F.relu(self.hidden(x)), sbp=weft.split(1))
            return self.head(hidden)

    torch.manual_seed(0)
    model, batch = Hinted().double(), vector_batch(8)
    expected = classification_loss(model, batch).detach()
    with weft.local_world(2):
        program = compiled(model)
        hints = [call for call in program.graph.nodes if getattr(call, "op", "") == "weft.hint"]
        assert [str(hint.outputs[0].layout.sbp[0]) for hint in hints] == ["S(1)"]
        torch.testing.assert_close(program.step(batch), expected)


def test_graph_and_plan_print_and_parse() -> None:
    with weft.local_world(2):
        program = compiled(MLP().double())
    assert parse_graph(str(program.graph)) == program.graph
    assert parse_plan(str(program.plan)) == program.plan


def test_explain_names_bytes_causes_and_lines() -> None:
    with weft.local_world(2):
        batch = vector_batch(8, dtype=torch.float32)
        text = compiled(MLP(), strategy=weft.data_parallel(), example_batch=batch).explain(
            details=True
        )
    line = next(line for line in text.splitlines() if "update SGD of head.weight" in line)
    # 4 x 16 float32, all-reduced by 2 ranks: 2(p-1)T = 512 bytes (the model is in single precision).
    assert "all_reduce" in line
    assert "512 B" in line
    assert re.search(r"aten.mm.default at \S*models.py:\d+ in head \(backward\)", line)
    assert "memory at its peak, as the plan states it" in text


def test_strategies_are_files(tmp_path: Path) -> None:
    strategy = weft.Strategy(
        batch={"*": (S(0), B)}, parameters={"head.weight": (B, S(0)), "*": weft.broadcast}
    )
    strategy.save(tmp_path / "strategy.yaml")
    assert weft.Strategy.load(tmp_path / "strategy.yaml") == strategy
    assert "head.weight:" in (tmp_path / "strategy.yaml").read_text()


def test_a_model_on_the_meta_device() -> None:
    torch.manual_seed(5)
    model = MLP()
    with torch.device("meta"):
        bare = MLP()
    torch.manual_seed(5)
    with weft.local_world(2):
        program = compiled(bare, example_batch=vector_batch(8, dtype=torch.float32))
        state = program.full_state_dict()
        program.step(vector_batch(8, dtype=torch.float32))
        assert_same_state(whole_state(bare), program.full_state_dict(), 0)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(parameter.is_meta for parameter in bare.parameters())


def test_only_one_rank_needs_no_world() -> None:
    model, batch = MLP().double(), vector_batch(8)
    expected = classification_loss(model, batch).detach()
    program = compiled(model, placement=weft.placement("cpu", [0]))
    torch.testing.assert_close(program.step(batch), expected)
    assert not program.plan.communicators


def test_explain_counts_repeated_blocks_once() -> None:
    tokens = {"x": torch.zeros(4, 8, dtype=torch.int64), "y": torch.zeros(4, 8, dtype=torch.int64)}
    with weft.local_world(2):
        model = GPT(layers=3)
        optimizer = torch.optim.AdamW(model.parameters())
        program = compiled(model, loss_fn=token_loss, optimizer=optimizer, example_batch=tokens)
    lines = program.explain(details=True).splitlines()
    (row,) = [line for line in lines if "parameter" in line and "blocks.*.up.weight" in line][:1]
    # 64 x 16 float32 and its two moments of AdamW, and a step count of 4 bytes.
    assert row.split() == [
        "3",
        "parameter",
        "blocks.*.up.weight",
        "float32[64,",
        "16]",
        "(B)",
        "4.0",
        "KiB",
        "8.0",
        "KiB",
    ]


def test_explain_lists_buckets() -> None:
    with weft.local_world(2) as world:
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        placement = weft.placement("cpu", [0, 1])
        program = weft.compile(
            model,
            classification_loss,
            optimizer,
            vector_batch(8, dtype=torch.float32),
            placement=placement,
            strategy=weft.data_parallel(),
        )
        text = program.explain(details=True)
    title = text.splitlines().index(f"buckets of rank {world.ranks[0]}")
    rows = [line.split() for line in text.splitlines()[title + 2 :]]
    row = next(row for row in rows if row[1:2] == ["all_reduce"])
    # All gradients go together.
    assert int(row[2]) > int(row[3]) == 1


def test_a_program_says_what_it_is() -> None:
    model = nn.Linear(4, 2)
    batch = {"x": torch.ones(8, 4), "y": torch.ones(8, 2)}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).square().mean()

    with weft.local_world(2):
        ranks = weft.placement("cpu", [0, 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        program = weft.compile(model, loss_fn, optimizer, batch, placement=ranks)
        program.step(batch)
        text = "Linear, training step by SGD on cpu [0, 1]; batch x float32[8, 4], y float32[8, 2]; 1 step made"
        assert repr(program) == f"<weft.Program: {text}>"
        evaluation = program.evaluation(loss_fn, batch)
        assert "Linear, evaluation on cpu [0, 1]" in str(evaluation)
        program.close()
        assert repr(program).endswith("closed>")
