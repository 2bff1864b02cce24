"""Sample calls of the ops of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.draw import GENERATOR, f
from tools.oracles.meanings import routes
from tools.oracles.rules import TorchCall, torch_call


def ids(*shape: int, experts: int) -> torch.Tensor:
    """Experts of rows; -1 and `experts` are none."""
    return torch.randint(-1, experts + 1, shape, generator=GENERATOR)


def products_of_rows() -> Iterator[TorchCall]:
    for rows, experts in ((12, 4), (5, 6), (9, 1)):
        chosen = ids(rows, experts=experts)
        yield torch_call("weft.expert_mm", f(rows, 4), f(experts, 4, 6), chosen, 0)
        yield torch_call("weft.expert_gradient", f(rows, 4), f(rows, 6), chosen, experts, 0)
    yield torch_call("weft.expert_mm", f(12, 4), f(4, 4, 6), ids(12, experts=8) + 3, 3)
    yield torch_call("weft.segments", torch.tensor([2, 2, 9]), 12, 0)
    # One expert has all rows.
    yield torch_call("weft.expert_mm", f(12, 4), f(4, 4, 6), torch.full((12,), 2), 0)


def products_of_blocks() -> Iterator[TorchCall]:
    for blocks, experts in ((4, 8), (2, 2), (1, 3), (12, 12)):
        chosen = ids(blocks, 6, experts=experts // blocks)
        x, w, g = f(blocks, 6, 4), f(experts, 4, 5), f(blocks, 6, 5)
        yield torch_call("weft.expert_mm", x, w, chosen, 0)
        yield torch_call("weft.expert_gradient", x, g, chosen, experts, 0)


def ways_of_rows() -> Iterator[TorchCall]:
    for groups, blocks, capacity in ((4, 4, 6), (1, 2, 24), (12, 3, 2), (6, 1, 4)):
        chosen = ids(24, experts=12)
        call = (12, groups, blocks, capacity)
        yield torch_call("weft.routes", chosen, *call)
        places = routes(chosen, *call)
        yield torch_call("weft.dispatch", chosen, places, *call[1:], -1, 0, 1)
        buffer = f(blocks, groups * capacity, 5)
        for each in (1, 2):
            yield torch_call("weft.dispatch", f(24 // each, 5), places, *call[1:], 0, 0, each)
            yield torch_call("weft.combine", buffer, places, groups, capacity, 0, each)


FAMILIES = (products_of_rows, products_of_blocks, ways_of_rows)
