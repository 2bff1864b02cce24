"""Parameters that tensor parallelism splits, by optimizers whose update needs the whole of them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from on_ranks import passed
from program.matrices_on_processes import (
    MAKERS,
    STRATEGIES,
    check_matrices,
    muon,
    net,
    rows,
    squares,
)
from single_device import assert_same_state
from weft.errors import UserError
from weft.ir.logical import Call, Input

PAIR = weft.placement("cpu", [0, 1])
TENSOR = STRATEGIES["tensor"][1]


@pytest.mark.parametrize("rule", MAKERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_beside_plain_pytorch(name: str, rule: str) -> None:
    with weft.local_world(torch.tensor(STRATEGIES[name][0]).numel()):
        check_matrices(name, rule)


@pytest.mark.slow
def test_steps_in_processes() -> None:
    script = Path(__file__).with_name("matrices_on_processes.py")
    passed(script, 4, "uneven", "zero 1", "stages")


def compiled(model: nn.Module, optimizer: object, strategy: weft.Strategy = TENSOR) -> weft.Program:
    return weft.compile(model, squares, optimizer, rows(0), placement=PAIR, strategy=strategy)  # type: ignore[arg-type]


def test_products_are_of_the_parts_that_the_strategy_names() -> None:
    model = net()
    with weft.local_world(2):
        program = compiled(model, muon(model))
        values = program.graph.values
        lies = {n.key: str(n.value.layout) for n in program.graph.of_kind(Input)}
        products = [call for call in program.graph.of_kind(Call) if call.op == "aten.addmm.default"]
        said = program.explain()
        program.close()
    for key in ("0.weight", "2.weight", "2.weight.momentum_buffer"):
        assert "(B)" in lies[key]
    operands = [[str(values[ref.name].layout) for ref in call.args[1:3]] for call in products]  # type: ignore[union-attr]
    assert ["(S(1))" in text for text in operands[0]] == [False, True]
    assert "(S(1))" in operands[1][0]
    assert "(S(0))" in operands[1][1]
    assert "3 of 4 parameters split over axis 0" in said
    assert "0.weight, 2.weight are whole and are used in parts" in said


def test_other_shapes_and_parameters_that_are_frozen_meanwhile() -> None:
    """Their plans take what lies whole as it lies; so do evaluations and updates by themselves."""
    model = net()
    plain = copy.deepcopy(model)
    optimizers, expected = muon(model), muon(plain)
    with weft.local_world(2):
        program = compiled(model, optimizers)
        evaluation = program.evaluation(lambda model, batch: model(batch["x"]), rows(0))
        for number, trains in enumerate([True, False, True]):
            batch = {key: x[: 8 - 2 * number] for key, x in rows(number).items()}
            for each in (model, plain):
                each[0].weight.requires_grad_(trains)
            squares(plain, batch).backward()
            for one in expected:
                one.step()
                one.zero_grad()
            if trains:
                program.step(batch, update=False)
                program.update()
            else:
                program.step(batch)
            assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-9)
            found = evaluation.step(rows(0))
            torch.testing.assert_close(found, plain(rows(0)["x"]).detach(), rtol=1e-9, atol=1e-12)
        program.close()


def test_another_program_reads_parts_of_what_lies_whole() -> None:
    model = net()
    with weft.local_world(2):
        first = compiled(model, muon(model))
        second = compiled(model, torch.optim.AdamW([model[2].bias]))  # type: ignore[list-item]
        assert "parameters split over axis 0" in second.explain()
        second.step(rows(0))
        first.step(rows(0))
        first.close()
        second.close()


def test_what_lies_in_parts_already_is_refused() -> None:
    """Its first plan did not train it; the strategy may say that it is to lie whole."""
    words = r"0\.weight is stored sharded by an earlier program, but Muon.*weft\.broadcast"
    model = net()
    model[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    with weft.local_world(2):
        program = compiled(model, muon(model))
        program.step(rows(0))
        model.requires_grad_(True)
        with pytest.raises(UserError, match=words):
            program.step(rows(0))
        program.close()
        weft.release(model)
        model[0].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
        whole = {"0.weight": weft.broadcast, **TENSOR.parameters}
        program = compiled(model, muon(model), weft.Strategy(parameters=whole))
        model.requires_grad_(True)
        program.step(rows(0))
        program.close()
