"""The six workloads: pieces of a sequence are the whole of it, and experts' plans say where everything is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.search.workloads.recurrent import PIECE, Sequences
from benchmarks.search.workloads.table import NODE, WORKLOADS
from weft.patterns import matches


def test_layers_in_pieces_are_layers_on_the_whole() -> None:
    torch.manual_seed(0)
    model = Sequences(8, 2, 16, 5, last=False)
    tokens = torch.randint(16, (2, 2 * PIECE + 3))
    whole = torch.nn.LSTM(8, 8, 2, batch_first=True)
    for number, layer in enumerate(model.stack.layers):
        for name, value in layer.named_parameters():
            whole.get_parameter(name.replace("l0", f"l{number}")).data.copy_(value)
    expected = model.head(whole(model.token(tokens))[0])
    torch.testing.assert_close(model(tokens), expected)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_plans_of_experts_name_parts_of_the_model(name: str) -> None:
    workload = WORKLOADS[name]
    with torch.device("meta"):
        model = workload.make()
    paths = [path for path, _ in model.named_modules() if path]
    for pattern in workload.linears:
        assert any(matches(pattern, path) for path in paths), pattern
    stages = [set(patterns) for patterns in workload.layers]
    for path, _ in model.named_parameters() if stages else ():
        inside = [any(path.startswith(f"{each}.") for each in stage) for stage in stages]
        assert inside.count(True) == 1, path
    for plan in workload.experts(2 * NODE, "cpu").values():
        ranks = [rank for stage in plan.stages or () for rank in stage.placement.ranks]  # type: ignore[union-attr]
        assert sorted(ranks) == (list(range(2 * NODE)) if stages else [])
