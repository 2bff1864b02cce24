"""Dimensions that a view merges and a later one parts: kept apart in between, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weft
from contexts import NOTHING
from single_device import assert_same_training, compiled, plain_training
from weft.boxing import steps
from weft.compiler.graph.unmerged_dims import Merged, keep_unmerged, merged_by
from weft.ir import parse_graph, verify
from weft.ir.logical import Box, Call, LogicalGraph

HEADS, WIDTH, TIME = 4, 8, 6

MERGED = """
graph "attention"
%q = batch "q" : float32[2, 4, 6, 8]
%k = batch "k" : float32[2, 4, 6, 8]
%rows = call aten.view.default(%q, [8, 6, 8]) : float32[8, 6, 8]
%columns = call aten.view.default(%k, [8, 6, 8]) : float32[8, 6, 8]
%turned = call aten.transpose.int(%columns, -1, -2) : float32[8, 8, 6]
%scores = call aten.bmm.default(%rows, %turned) : float32[8, 6, 6]
%soft = call aten._softmax.default(%scores, 2, False) : float32[8, 6, 6]
{then}
"""


def ops(graph: LogicalGraph) -> list[str]:
    return [call.op.removeprefix("aten.").split(".")[0] for call in graph.of_kind(Call)]


def after(then: str) -> LogicalGraph:
    return verify(keep_unmerged(verify(parse_graph(MERGED.format(then=then))), NOTHING))


def test_what_is_parted_again_stays_apart() -> None:
    graph = after(
        '%parted = call aten.view.default(%soft, [2, 4, 6, 6]) : float32[2, 4, 6, 6]\noutput "y" %parted'
    )
    assert ops(graph) == ["permute", "matmul", "_softmax"]
    assert all(call.outputs[0].shape[:2] == (2, 4) for call in graph.of_kind(Call))


@pytest.mark.parametrize(
    "then",
    [
        'output "y" %soft',
        '%other = call aten.view.default(%soft, [4, 2, 36]) : float32[4, 2, 36]\noutput "y" %other',
        (
            "%all = call aten.cumsum.default(%soft, 0) : float32[8, 6, 6]\n"
            '%parted = call aten.view.default(%all, [2, 4, 6, 6]) : float32[2, 4, 6, 6]\noutput "y" %parted'
        ),
    ],
    ids=["merged", "cut elsewhere", "across what is merged"],
)
def test_what_is_not_parted_stays_merged(then: str) -> None:
    assert after(then) == verify(parse_graph(MERGED.format(then=then)))


def test_what_is_read_both_ways_is_made_once() -> None:
    graph = after(
        "%parted = call aten.view.default(%soft, [2, 4, 6, 6]) : float32[2, 4, 6, 6]\n"
        'output "y" %parted\noutput "z" %soft'
    )
    assert ops(graph) == ["permute", "matmul", "_softmax", "view"]


@pytest.mark.parametrize(
    ("before", "shape", "found"),
    [
        ((2, 4, 6), (8, 6), Merged(2, 0, (2, 4))),
        ((6, 2, 12), (6, 8, 3), Merged(3, 1, (2, 4))),
        ((8, 6), (2, 4, 6), None),
        ((2, 3, 4), (4, 6), None),
        ((2, 4, 6, 8), (8, 48), None),
        ((0, 4), (0,), None),
    ],
)
def test_what_a_view_merges(
    before: tuple[int, ...], shape: tuple[int, ...], found: Merged | None
) -> None:
    assert merged_by(before, shape) == found


class Attention(nn.Module):
    """Attention on [batch·heads, time, width], as BLOOM, DeBERTa or nn.MultiheadAttention write it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        slopes = torch.linspace(0.1, 0.5, HEADS)[:, None, None] * torch.arange(TIME)
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("distances", torch.randn(2 * TIME, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, time, width = x.shape
        if self.kind == "matmul":
            q, k, v = (
                layer(x).view(n, time, HEADS, -1).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            return self.out(y.transpose(1, 2).reshape(n, time, width))
        if self.kind == "time first":
            rows = x.transpose(0, 1)
            q, k, v = (
                layer(rows).view(time, n * HEADS, -1).transpose(0, 1)
                for layer in (self.query, self.key, self.value)
            )
            y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
            return self.out(y.transpose(0, 1).reshape(time, n, width)).transpose(0, 1)
        q, k, v = (
            layer(x).view(n, time, HEADS, -1).transpose(1, 2).reshape(n * HEADS, time, -1)
            for layer in (self.query, self.key, self.value)
        )
        if self.kind == "relative":
            scores = torch.bmm(q, k.transpose(1, 2)) + self.relative(q, n)
        else:
            biases = self.slopes.repeat(n, 1, 1)
            scores = torch.baddbmm(biases, q, k.transpose(1, 2), beta=0.5, alpha=0.7)
        y = torch.bmm(torch.softmax(scores, -1), v).view(n, HEADS, time, -1)
        return self.out(y.transpose(1, 2).reshape(n, time, width))

    def relative(self, q: Tensor, n: int) -> Tensor:
        """What queries and distances make, looked up for each pair of positions, as DeBERTa does."""
        time = q.shape[1]
        keys = self.key(self.distances).view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
        scores = torch.bmm(q, keys.repeat(n, 1, 1).transpose(1, 2))
        apart = torch.arange(time)[:, None] - torch.arange(time)[None] + time
        return torch.gather(scores, -1, apart.unsqueeze(0).expand(n * HEADS, time, time))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("kind", ["matmul", "time first", "biases", "relative"])
def test_heads_stay_where_they_are(kind: str) -> None:
    """Tensor parallel by heads: sums of activations are exchanged, and nothing goes from heads to the batch."""
    torch.manual_seed(0)
    model = Attention(kind)
    batches = [torch.randn(4, TIME, WIDTH) for _ in range(3)]
    expected = plain_training(model, loss_fn, batches)
    strategy = weft.tensor_parallel(("query", "key", "value"), ("out",))
    with compiled(model, loss_fn, batches[0], [0, 1], strategy) as program:
        assert "aten.matmul.default" in {call.op for call in program.graph.of_kind(Call)}
        assert "all_to_all" not in kinds(program.graph)
        assert_same_training(program, batches, expected)


def kinds(graph: LogicalGraph) -> set[str]:
    """Of all exchanges."""
    return {
        step.kind
        for box in graph.of_kind(Box)
        if (source := graph.values[box.input.name].layout) and box.output.layout
        for step in steps(source, box.output.layout, box.output.shape, 8)
    }


@pytest.mark.usefixtures("double_precision")
def test_batches_and_micro_batches() -> None:
    torch.manual_seed(0)
    model = Attention("biases")
    batches = [torch.randn(4, TIME, WIDTH) for _ in range(3)]
    expected = plain_training(model, loss_fn, batches)
    strategy = weft.Strategy(batch={"*": weft.split(0)}, micro_batches=2, zero=weft.Zero(2))
    with compiled(model, loss_fn, batches[0], [0, 1], strategy) as program:
        assert_same_training(program, batches, expected)
