"""Costs on a topology: those of its devices' kinds and of its links."""

from __future__ import annotations

import pytest

from weft.errors import UserError
from weft.hardware.collectives import collective_seconds, transfer_seconds
from weft.hardware.devices import call_seconds, device_kind, update_seconds
from weft.hardware.planning_costs import TopologyCosts
from weft.hardware.topology_files import parse_topology, topology
from weft.ops import OpCall, Operand, TensorSpec
from weft.units import Bytes

H100 = TopologyCosts(topology("h100x16"))
MIXED = {
    "weft_topology": 1,
    "name": "mixed",
    "nodes": [
        {
            "devices": [{"kind": "cpu"}, {"kind": "h100-sxm-80gb"}],
            "switches": [{"name": "pcie", "link": "pcie3-x16", "joins": ["device0", "device1"]}],
        }
    ],
}


def call(op: str, *shapes: tuple[int, ...], result: tuple[int, ...]) -> OpCall:
    specs = tuple(TensorSpec(shape, "bfloat16") for shape in shapes)
    operands = tuple(map(Operand, range(len(specs))))
    return OpCall(op, operands, (), specs, (TensorSpec(result, "bfloat16"),))


PRODUCT = call("aten.mm.default", (512, 256), (256, 1024), result=(512, 1024))


def test_work_costs_what_the_device_kind_says() -> None:
    kind = H100.kind(3)
    assert H100.of_call(3, PRODUCT).seconds == call_seconds(kind, PRODUCT)
    assert H100.of_update(3, "AdamW", Bytes(1 << 20)).seconds == update_seconds(
        kind, Bytes(1 << 20)
    )
    assert H100.of_act(3) == kind.act
    assert not H100.of_call(3, PRODUCT).estimate


def test_exchanges_cost_what_the_links_say() -> None:
    groups = [[0, 8], [1, 9]]
    size = Bytes(1 << 24)
    found = H100.of_collective("all_reduce", size, size, groups).seconds
    assert found == collective_seconds(H100.topology, "all_reduce", size, groups)
    near = H100.of_collective("all_reduce", size, size, [[0, 1], [2, 3]]).seconds
    assert near < found  # within a node
    sent = [(0, 8, size)]
    assert H100.of_transfer(sent, size).seconds == transfer_seconds(H100.topology, sent)


def test_limits_are_those_of_the_kind() -> None:
    found, kind = H100.capacity(0), H100.kind(0)
    assert (found.name, found.memory, found.reserve) == (kind.name, kind.memory, kind.reserve)
    assert found.peaks["bfloat16"] == kind.peaks["bfloat16"]
    assert found.launched


def test_ranks_of_a_kind_are_alike() -> None:
    assert H100.like(5) == H100.like(11) == 5
    assert H100.device_type == device_kind(H100.kind(0).name).device_type == "cuda"


def test_a_dtype_without_a_peak_is_an_estimate() -> None:
    """It computes as float32 does; what no matrix unit computes is as quick in any dtype."""
    v100 = TopologyCosts(topology("v100x8"))
    assert v100.of_call(0, PRODUCT).estimate == (
        "v100-sxm2-16gb has no peak for bfloat16: that of float32"
    )
    assert not H100.of_call(0, PRODUCT).estimate
    added = call("aten.add.Tensor", (4, 6), (4, 6), result=(4, 6))
    assert not v100.of_call(0, added).estimate


def test_an_op_without_rule_is_an_estimate() -> None:
    found = H100.of_call(0, call("mylib.op.default", (512, 256), result=(512, 256)))
    assert found.seconds > 0
    assert found.estimate == "mylib.op.default has no rule: it reads and writes its tensors once"


def test_devices_are_of_one_type() -> None:
    with pytest.raises(UserError, match="mixed has devices of the types cpu and cuda; a plan runs"):
        _ = TopologyCosts(parse_topology(MIXED, "mixed.yaml")).device_type
