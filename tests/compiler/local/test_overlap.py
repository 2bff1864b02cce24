"""A step with its batch in parts: what one part exchanges runs beside the products of the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contexts import NOTHING
from weft.compiler.context import Options
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box, deduce
from weft.compiler.local.localize import communicators, localize
from weft.compiler.local.overlap import (
    BatchCut,
    batch_leaves,
    best_cut,
    exchanged_in_parts,
    in_parts,
    may_cut,
)
from weft.hardware import DefaultDevice, default_device
from weft.hardware.planning_costs import bucket_bytes
from weft.ir import LogicalGraph, parse_graph
from weft.ir.plan import Collective, LocalCall, LocalProgram
from weft.layout import SBP, Broadcast, Split, placement

PAIR = placement("cpu", [0, 1])
WHOLE, ROWS, COLUMNS = (Broadcast(),), (Split(0),), (Split(1),)

# Two layers, the first split by columns and the second by rows; the gradient of its operand.
STEP = """\
graph "pair"
%u = parameter "up" : float32[{wide}, {wide}]
%d = parameter "down" : float32[{wide}, {wide}]
%x = batch "x" : float32[{batch}, {wide}]
%a = call aten.mm.default(%x, %u) : float32[{batch}, {wide}] at "train.py":3 in "up"
%h = call aten.relu.default(%a) : float32[{batch}, {wide}] at "train.py":3
%y = call aten.mm.default(%h, %d) : float32[{batch}, {wide}] at "train.py":4 in "down"
%k = call weft.hint(%y) : float32[{batch}, {wide}] hint(B) at "train.py":5
%z = call aten.tanh.default(%k) : float32[{batch}, {wide}] at "train.py":5
%loss = call aten.sum.default(%z) : float32[] at "train.py":6
%t = call aten.t.default(%h) : float32[{wide}, {batch}] at "train.py":4 in "down" backward
%gd = call aten.mm.default(%t, %z) : float32[{wide}, {wide}] at "train.py":4 in "down" backward
update "SGD" group 0 %d from %gd
output "loss" %loss
"""
TENSORS: dict[str, tuple[SBP, ...]] = {"x": WHOLE, "up": COLUMNS, "down": ROWS}
DATA: dict[str, tuple[SBP, ...]] = {"x": ROWS, "up": WHOLE, "down": WHOLE}


def boxed(layouts: dict[str, tuple[SBP, ...]], batch: int = 8, wide: int = 6) -> LogicalGraph:
    graph = parse_graph(STEP.format(batch=batch, wide=wide))
    return box(graph, deduce(graph, Hints(layouts), PAIR))


def local(graph: LogicalGraph, rank: int = 1) -> LocalProgram:
    return localize(graph, rank, communicators(graph))


def test_products_stand_beside_exchanges() -> None:
    """Between the exchange of a part and its first reader there is the product of the next part."""
    nodes = in_parts(local(boxed(TENSORS)), 4).nodes
    made = {value.name: place for place, node in enumerate(nodes) for value in node.makes}
    exchanges = [node for node in nodes if isinstance(node, Collective)]
    parts = [node for node in exchanges if node.output.name.endswith(("0", "1", "2"))]
    assert len(parts) == 3
    for number, exchange in enumerate(parts):
        readers = [place for place, node in enumerate(nodes) if exchange.output.name in node.reads]
        product = next(
            place
            for place, node in enumerate(nodes)
            if isinstance(node, LocalCall)
            and node.op == "aten.mm.default"
            and node.makes[0].name == exchanges[exchanges.index(exchange) + 1].input.name
        )
        assert made[exchange.output.name] < product < min(readers), number


def test_as_many_bytes_travel() -> None:
    whole, cut = (
        [node for node in in_parts(local(boxed(TENSORS)), parts).nodes if type(node) is Collective]
        for parts in (1, 4)
    )
    assert sum(node.bytes for node in cut) == sum(node.bytes for node in whole) > 0
    assert len(cut) > len(whole)


def test_batches_that_do_not_divide_stay_whole() -> None:
    program = local(boxed(TENSORS, batch=6))
    assert not batch_leaves(program, 4)
    assert sorted(map(str, in_parts(program, 4).nodes)) == sorted(map(str, program.nodes))


def slow(link: float) -> DefaultDevice:
    return replace(default_device("cpu"), link=link, latency=1e-6, start=1e-7)


def cut_for(graph: LogicalGraph, device: DefaultDevice) -> BatchCut:
    options = Options(bucket_bytes=bucket_bytes(device, (0, 1)))
    context = replace(NOTHING, options=options)
    return best_cut(local(graph, 0), communicators(graph), {}, device, context)


def test_slow_links_are_worth_it() -> None:
    """Where an exchange takes about as long as the products beside it, parts hide most of it."""
    graph = boxed(TENSORS, batch=512, wide=512)
    found = cut_for(graph, slow(1e8))
    assert found.parts > 1
    assert found.cut < 0.95 * found.whole
    (note,) = found.notes
    assert f"in {found.parts} parts" in note


@pytest.mark.parametrize(
    ("layouts", "device"), [(TENSORS, slow(1e12)), (DATA, slow(1e8)), (TENSORS, slow(1e3))]
)
def test_nothing_is_cut_for_nothing(
    layouts: dict[str, tuple[SBP, ...]], device: DefaultDevice
) -> None:
    """Fast links, gradients that travel beside the backward anyway, or links so slow that products hide nothing."""
    assert cut_for(boxed(layouts, batch=512, wide=512), device) == BatchCut()


def test_uneven_shards_forbid_it() -> None:
    """Ranks whose shapes differ might cut differently, and wait for each other's parts for ever."""
    assert may_cut(boxed(TENSORS), Options())
    assert not may_cut(boxed(TENSORS, wide=7), Options())
    assert not may_cut(boxed(TENSORS), Options(offload=("up",)))


@pytest.mark.parametrize("parts", [2, 4])
def test_the_exchanges_of_parts_are_those_that_the_cut_program_has(parts: int) -> None:
    """Told without cutting anything."""
    program = local(boxed(TENSORS), 0)
    found = [node.output.name for node in exchanged_in_parts(program, parts)]
    made = {
        node.output.name for node in in_parts(program, parts).nodes if isinstance(node, Collective)
    }
    assert found
    assert made >= {f"{name}.part{turn}" for name in found for turn in range(parts)}
    assert len([name for name in made if ".part" in name]) == parts * len(found)
