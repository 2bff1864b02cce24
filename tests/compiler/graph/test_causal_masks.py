"""Which masks of attention are proved to be causal, and which must stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contexts import NOTHING
from interpreter import run
from weft.capture import capture
from weft.compiler.graph.causal_masks import causal_masks
from weft.compiler.graph.constant_folding.folded_calls import fold_constants
from weft.compiler.graph.constant_folding.folded_values import Along, Known
from weft.ir import LogicalGraph, parse_graph, verify
from weft.ir.logical import Call

Mask = Callable[[Tensor], Tensor]
# Of the batch, of queries, and of keys where they are more.
ROWS, TIME, LONGER = 2, 6, 8
INF = float("inf")

STEP = """\
graph "step"
%w = parameter "w" : float32[2, 1, 4, 3]
%x = batch "x" : float32[2, 1, 4, 3]
%q = call aten.mul.Tensor(%x, %w) : float32[2, 1, 4, 3]
%i = call aten.arange.default(4, device=!device:cpu) : int64[4]
%row = call aten.unsqueeze.default(%i, 1) : int64[4, 1]
%le = call aten.le.Tensor(%i, %row) : bool[4, 4]
%zero = call aten.scalar_tensor.default(0.0, dtype=!dtype:float32) : float32[]
%inf = call aten.scalar_tensor.default(-Infinity, dtype=!dtype:float32) : float32[]
%m = call aten.where.self(%le, %zero, %inf) : float32[4, 4]
%o, %s = call aten._scaled_dot_product_flash_attention_for_cpu.default(%q, %x, %x, \
attn_mask=%m, scale=0.5) : float32[2, 1, 4, 3], float32[2, 1, 4]
%loss = call aten.sum.default(%o) : float32[]
%ones = call aten.full.default([2, 1, 4, 3], 1, dtype=!dtype:float32) : float32[2, 1, 4, 3]
%gq, %gk, %gv = call aten._scaled_dot_product_flash_attention_for_cpu_backward.default(\
%ones, %q, %x, %x, %o, %s, 0.0, False, \
attn_mask=%m, scale=0.5) : float32[2, 1, 4, 3], float32[2, 1, 4, 3], float32[2, 1, 4, 3]
%gw = call aten.mul.Tensor(%gq, %x) : float32[2, 1, 4, 3]
update "SGD" group 0 %w from %gw
output "loss" %loss
output "[1]" %le
"""


def test_a_flag_beside_a_mask_that_keeps_all_stays() -> None:
    zeros = "call aten.zeros.default([4, 4], dtype=!dtype:float32)"
    text = STEP.replace("call aten.where.self(%le, %zero, %inf)", zeros)
    text = text.replace("0.0, False,", "0.0, True,").replace("%x, attn", "%x, 0.0, True, attn")
    assert _kinds(verify(causal_masks(parse_graph(text), NOTHING))) == [True, True]


def positions(x: Tensor, count: int = TIME) -> Tensor:
    return torch.arange(count, device=x.device)


def compared(x: Tensor) -> Tensor:
    return positions(x) <= positions(x)[:, None]


def flipped(x: Tensor) -> Tensor:
    return positions(x)[:, None].expand(ROWS, 1, TIME, 1) >= positions(x)


def shifted_alike(x: Tensor) -> Tensor:
    return (positions(x) + 3)[None] < (positions(x) + 4).view(TIME, 1)


def lower_triangle(x: Tensor) -> Tensor:
    return torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).tril()


def of_zeros_and_ones(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(TIME, TIME, dtype=torch.long, device=x.device)) == 1


def not_upper_triangle(x: Tensor) -> Tensor:
    return ~torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).triu(1)


def added_triangle(x: Tensor) -> Tensor:
    """As `nn.Transformer.generate_square_subsequent_mask`."""
    return torch.triu(torch.full((TIME, TIME), -INF, device=x.device), diagonal=1).to(x.dtype)


def filled(x: Tensor) -> Tensor:
    zeros = torch.zeros(1, 1, TIME, TIME, device=x.device, dtype=x.dtype)
    return zeros.masked_fill(~compared(x), torch.finfo(x.dtype).min)


def chosen(x: Tensor) -> Tensor:
    return torch.where(compared(x), 0.0, torch.finfo(torch.float32).min).to(x.dtype)


def wide_window(x: Tensor) -> Tensor:
    return compared(x) & (positions(x) > positions(x)[:, None] - TIME)


def one_sequence(x: Tensor) -> Tensor:
    """As `transformers` numbers packed sequences, of which positions in one row are one."""
    ids = positions(x)[None].expand(ROWS, -1)
    breaks = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1
    packed = breaks.cumsum(-1)
    return compared(x) & (packed[:, None, :, None] == packed[:, None, None, :])


def picked(x: Tensor) -> Tensor:
    """Read with index tensors, and cut to what they were."""
    ids = positions(x, LONGER)[None].expand(ROWS, -1)[:, :TIME]
    batch = torch.arange(ROWS, device=x.device).view(ROWS, 1, 1, 1)
    row, column = positions(x).view(1, 1, TIME, 1), positions(x).view(1, 1, 1, TIME)
    return (ids[batch, row] >= ids[batch, column])[:, :, :TIME].clone()


def everything(x: Tensor) -> Tensor:
    packed = (positions(x) * 0).expand(ROWS, -1)
    return packed[:, None, :, None] == packed[:, None, None, :]


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(TIME, TIME, device=x.device, dtype=x.dtype)


def of_the_batch(x: Tensor) -> Tensor:
    return compared(x) & (x[:, :, None, :, 0] < 5)


def packed_in_the_batch(x: Tensor) -> Tensor:
    packed = (x[:, 0, :, 0] > 0).cumsum(-1)
    return compared(x) & (packed[:, None, :, None] == packed[:, None, None, :])


def packed_here(x: Tensor) -> Tensor:
    packed = (positions(x) >= 2).cumsum(-1) * (positions(x) < TIME)
    packed = (packed > 0).to(torch.long)
    return compared(x) & (packed[:, None] == packed)


def narrow_window(x: Tensor) -> Tensor:
    return compared(x) & (positions(x) > positions(x)[:, None] - 3)


def prefix(x: Tensor) -> Tensor:
    return compared(x) | (positions(x) < 2)


def strictly_lower(x: Tensor) -> Tensor:
    return positions(x) < positions(x)[:, None]


def one_ahead(x: Tensor) -> Tensor:
    return torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).tril(1)


def upper(x: Tensor) -> Tensor:
    return positions(x) >= positions(x)[:, None]


def turned_around(x: Tensor) -> Tensor:
    return positions(x) * -1 + TIME <= positions(x)[:, None]


def weighed(x: Tensor) -> Tensor:
    return torch.triu(torch.full((TIME, TIME), -1e4, device=x.device), diagonal=1).to(x.dtype)


def distances(x: Tensor) -> Tensor:
    far = (positions(x) - positions(x)[:, None]).to(x.dtype)
    return far.masked_fill(~compared(x), -INF)


def of_chance(x: Tensor) -> Tensor:
    return compared(x) & (torch.rand(TIME, TIME, device=x.device) < 2)


CAUSAL = [
    *(compared, flipped, shifted_alike, lower_triangle, of_zeros_and_ones, not_upper_triangle),
    *(added_triangle, filled, chosen, wide_window, one_sequence, picked),
]
KEEPS_ALL = [everything, zeros]
OTHERS = [
    *(of_the_batch, packed_in_the_batch, packed_here, narrow_window, prefix, strictly_lower),
    *(one_ahead, upper, turned_around, weighed, distances, of_chance),
]


def captured(mask: Mask, keys: int = TIME) -> LogicalGraph:
    """A step with attention under a mask, forward and backward."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            other = F.pad(x * self.w, (0, 0, 0, keys - TIME))
            made = F.scaled_dot_product_attention(x * self.w, other, other.sin(), mask(x))
            return (made**2).sum()

    model, batch = Step(), torch.randn(ROWS, 2, TIME, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, lambda model, x: model(x), optimizer, batch).graph


def _kinds(graph: LogicalGraph) -> list[object]:
    """For each attention: whether it is causal, or "masked"."""
    found: list[object] = []
    for call in graph.of_kind(Call):
        if "attention" in call.op:
            causal = call.args[7 if "backward" in call.op else 4 :]
            found.append("masked" if "attn_mask" in dict(call.kwargs) else causal == (True,))
    return found


@pytest.mark.parametrize("mask", CAUSAL)
def test_causal_masks_become_the_flag(mask: Mask) -> None:
    graph = verify(causal_masks(captured(mask), NOTHING))
    assert _kinds(graph) == [True, True]
    assert not any(value.shape[-2:] == (TIME, TIME) for value in graph.values.values())


@pytest.mark.parametrize("mask", KEEPS_ALL)
def test_masks_that_keep_all_go(mask: Mask) -> None:
    assert _kinds(verify(causal_masks(captured(mask), NOTHING))) == [False, False]


@pytest.mark.parametrize("mask", OTHERS)
def test_other_masks_stay(mask: Mask) -> None:
    graph = captured(mask)
    assert causal_masks(graph, NOTHING) == graph
    assert _kinds(graph) == ["masked", "masked"]


def test_more_keys_than_queries_stay() -> None:
    graph = captured(lambda x: positions(x, LONGER) <= positions(x)[:, None], LONGER)
    assert causal_masks(graph, NOTHING) == graph
    assert _kinds(graph) == ["masked", "masked"]


def _tensor(known: Known, shape: tuple[int, ...]) -> Tensor:
    if isinstance(known, Along):
        sizes = (-1,) + (1,) * (-known.axis - 1) if known.axis else ()
        return torch.from_numpy(known.data.reshape(sizes).copy()).expand(shape)
    keys = np.arange(known.keys)
    inside = (known.first[:, None] <= keys) & (keys < known.last[:, None])
    return torch.from_numpy(np.where(inside, known.inside, known.outside)).expand(shape)


@pytest.mark.parametrize("mask", [*CAUSAL, *KEEPS_ALL, *OTHERS])
def test_known_values_are_those_that_torch_computes(mask: Mask) -> None:
    graph = captured(mask)
    batch, w = torch.randn(ROWS, 2, TIME, 4), torch.randn(4)
    inputs = {
        (node.role, node.key): w if node.role == "parameter" else batch
        for node in graph.nodes
        if not isinstance(node, Call) and node.makes
    }
    step = run(graph, inputs)
    known = fold_constants(graph)
    assert known
    for name, value in known.items():
        found = step.value(name, 0)
        assert torch.equal(_tensor(value, tuple(found.shape)).to(found.dtype), found), name
