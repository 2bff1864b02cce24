"""A training step written by hand on two placements: the first layer on one, the second on the other."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from drafts import planned
from weft.compiler.local.localize import communicators, localize
from weft.compiler.signatures import check_signatures
from weft.ir import LogicalGraph, verify
from weft.ir.parse import parse_graph
from weft.ir.plan import Communicate, Communicator, RankPlan
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import World

# Rank 1 stands in both placements, rank 3 only in the second one, rank 0 only in the first.
TEXT = """graph "two placements"
placement @0 = cpu [0, 1]
placement @1 = cpu [[1, 2], [3, 4]]
%v = parameter "first" : float64[6, 5] @0(B)
%w = parameter "second" : float64[4, 6] @1(B, S(0))
%x = batch "x" : float64[7, 5] @0(S(0))
%vt = call aten.t.default(%v) : float64[5, 6] @0(B)
%h = call aten.mm.default(%x, %vt) : float64[7, 6] @0(S(0))
%h.far = box %h : float64[7, 6] @1(S(0), B)
%wt = call aten.t.default(%w) : float64[6, 4] @1(B, S(1))
%y = call aten.mm.default(%h.far, %wt) : float64[7, 4] @1(S(0), S(1))
%sum = call aten.sum.default(%y) : float64[] @1(P(sum), P(sum))
%loss = box %sum : float64[] @0(B)
%gh = call aten.mm.default(%y, %w) : float64[7, 6] @1(S(0), P(sum))
%gh.near = box %gh : float64[7, 6] @0(S(0))
%ght = call aten.t.default(%gh.near) : float64[6, 7] @0(S(1))
%gv = call aten.mm.default(%ght, %x) : float64[6, 5] @0(P(sum))
%gv.all = box %gv : float64[6, 5] @0(B)
output "loss" %loss
output "gradient" %gv.all
output "far" %gh
"""


def expected(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient as one device computes them."""
    hidden = x @ first.t()
    out = hidden @ second.t()
    return out.sum(), (out @ second).t() @ x


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((7, 5), (6, 5), (4, 6))
    x, first, second = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, first, second


def two_placements(size: int) -> tuple[LogicalGraph, tuple[Communicator, ...]]:
    """The graph, with ranks from 0 to `size`; with 4 ranks, rank 4's place is taken by rank 0."""
    text = TEXT if size > 4 else TEXT.replace("[3, 4]", "[3, 0]")
    graph = check_signatures(verify(parse_graph(text), with_layouts=True))
    return graph, communicators(graph)


def rank_plan(graph: LogicalGraph, groups: tuple[Communicator, ...], rank: int) -> RankPlan:
    program = localize(graph, rank, groups)
    return planned(program, groups=groups)


def check_two_placements(world: World, steps: int = 2) -> None:
    """Every rank gets the results of the placements that it is in, the same in every step."""
    graph, groups = two_placements(world.size)
    x, first, second = tensors()
    loss, gradient = expected(x, first, second)
    whole = {"x": x, "first": first, "second": second, "loss": loss, "gradient": gradient}
    values = {node.key: node.value for node in graph.nodes if hasattr(node, "key")}
    channels = world.connect(groups)

    def part(key: str, rank: int) -> Tensor:
        value = values[key]
        layout = (value if hasattr(value, "layout") else graph.values[value.name]).layout
        piece = whole[key]
        for dim, (offset, length) in enumerate(layout.local_ranges(tuple(piece.shape), rank)):
            piece = piece.narrow(dim, offset, length)
        return piece.contiguous()

    def run(rank: int) -> None:
        plan = rank_plan(graph, groups, rank)
        given = {item.key: part(item.key, rank) for item in plan.inputs}
        feed = {"x": given.pop("x")} if "x" in given else {}
        with ThreadExecutor(
            Rank(plan, world.device(rank), channels[rank], Variables(given)), timeout=30
        ) as executor:
            for _ in range(steps):
                results = executor.step(feed)
                assert set(results) == _outputs(rank, graph)
                for key in set(results) - {"far"}:
                    torch.testing.assert_close(results[key], part(key, rank))

    world.run(run)
    for group in groups:
        planned = Counter[str]()
        for actor in rank_plan(graph, groups, group.ranks[0]).actors:
            for node in actor.collectives if isinstance(actor, Communicate) else ():
                planned[node.kind] += steps * node.bytes * (node.communicator == group.id)
        mine = [channels[rank][group.id] for rank in world.ranks if rank in group.ranks]
        sent = sum((channel.sent for channel in mine), Counter[str]())
        assert len(mine) < len(group.ranks) or sent == +planned, group


def _outputs(rank: int, graph: LogicalGraph) -> set[str]:
    near, far = graph.placements
    found = {"loss", "gradient"} if rank in near.ranks else set()
    return found | ({"far"} if rank in far.ranks else set())
