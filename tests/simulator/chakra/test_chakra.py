"""Execution traces: bytes that read back by the schema's field numbers, of all ranks, with what each act waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from simulator.steps import planned_gpt
from weft.errors import UserError
from weft.hardware import usual_device
from weft.ir.plan import Communicate
from weft.simulator.chakra import ChakraNode, trace_bytes, write_chakra
from weft.simulator.simulate import costs_of
from weft.simulator.steps.acts import act_costs

CPU = usual_device("cpu")
# Of et_def.proto: NodeType.
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at : at + value]
            at += value
        else:
            assert key & 7 == 0
            yield key >> 3, value


def messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size, at = varint(data, at)
        yield data[at : at + size]
        at += size


def numbers(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        found.append(value)
    return found


def node(data: bytes) -> dict:
    found = {"id": 0, "after": [], "needs": [], "micros": 0, "attributes": {}}
    names = {1: "id", 2: "name", 3: "type", 7: "micros"}
    for number, value in fields(data):
        if number in (4, 5):
            found["after" if number == 4 else "needs"] = numbers(value)
        elif number == 10:
            (_, name), (kind, content) = fields(value)
            found["attributes"][name.decode()] = {13: int, 27: bool, 29: bytes.decode}[kind](
                content
            )
        else:
            found[names[number]] = value
    return found


def read(path) -> list[dict]:
    first, *rest = messages(path.read_bytes())
    assert list(fields(first)) == [(1, b"0.0.4")]
    return [node(each) for each in rest]


def written(folder, **fields):
    step = planned_gpt(**fields)
    ids = {one.id: one.ranks for one in step.communicators}
    write_chakra(step, costs_of(step, CPU), CPU, folder)
    return step, ids


def test_a_node_is_what_the_schema_says():
    attributes = {"is_cpu_op": False, "num_ops": 300, "pg_name": "7"}
    one = ChakraNode(3, "mm", "compute", (1, 200), (2,), 5, attributes)
    (found,) = [node(each) for each in list(messages(trace_bytes([one])))[1:]]
    assert found == {
        "id": 3,
        "name": b"mm",
        "type": COMPUTE,
        "needs": [1, 200],
        "after": [2],
        "micros": 5,
        "attributes": attributes,
    }
    # Bytes by hand: id 3, name "mm", type 4, ctrl_deps [2], data_deps [1, 200], duration 5.
    assert one.encoded().startswith(
        bytes([0x08, 3, 0x12, 2, 0x6D, 0x6D, 0x18, 4, 0x22, 1, 2, 0x2A, 3, 1, 0xC8, 1, 0x38, 5])
    )


@pytest.mark.parametrize("folded", [True, False])
def test_every_rank_has_a_trace_in_which_all_that_is_sent_is_received(tmp_path, folded):
    step, ranks = written(tmp_path, folded=folded)
    groups = json.loads((tmp_path / "comm_groups.json").read_text())
    assert {int(name) - 1: tuple(own) for name, own in groups.items()} == ranks
    open_pieces, collectives = {}, {}
    for rank in step.ranks:
        nodes = read(tmp_path / f"rank.{rank}.et")
        seen = set()
        for each in nodes:
            assert seen.issuperset(each["needs"] + each["after"])
            assert each["id"] not in seen
            seen.add(each["id"])
            of = each["attributes"]
            if each["type"] in (SEND, RECEIVE):
                sends = each["type"] == SEND
                assert of["comm_src" if sends else "comm_dst"] == rank
                ends = of["comm_src"], of["comm_dst"], of["comm_tag"], of["comm_size"]
                open_pieces[ends] = open_pieces.get(ends, 0) + (1 if sends else -1)
            if each["type"] == COLLECTIVE:
                assert rank in groups[of["pg_name"]]
                key = of["pg_name"], of["comm_type"], of["comm_size"]
                collectives.setdefault(key, {}).setdefault(rank, 0)
                collectives[key][rank] += 1
    assert open_pieces
    assert not any(open_pieces.values())
    for (group, *_), counts in collectives.items():
        assert sorted(counts) == sorted(groups[group])
        assert len(set(counts.values())) == 1


def test_calls_have_their_seconds_and_their_work(tmp_path):
    step, _ = written(tmp_path, stages=1, data=2, micro_batches=1, schedule=None, folded=False)
    nodes = read(tmp_path / "rank.0.et")
    acts = act_costs(step, CPU)
    seconds = acts.seconds(step.plans[0].rank)
    compute = [each for each in nodes if each["type"] == COMPUTE]
    assert sum(each["attributes"].get("num_ops", 0) for each in compute) > 0
    expected = sum(
        round(took * 1e6)
        for actor, took in zip(step.plans[0].actors, seconds, strict=True)
        if not isinstance(actor, Communicate)
    )
    assert sum(each["micros"] for each in compute) == pytest.approx(expected, abs=len(compute))


def test_ranks_whose_communicators_nobody_knows_are_refused(tmp_path):
    step = planned_gpt()
    # A fifth rank is said to be like the first, but no communicator has it.
    alone = replace(step, ranks=range(5), classes={**step.classes, 4: 0})
    with pytest.raises(UserError, match="plan all ranks to write their traces"):
        write_chakra(alone, costs_of(alone, CPU), CPU, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    step = planned_gpt()
    with pytest.raises(UserError, match="cannot write the traces"):
        write_chakra(step, costs_of(step, CPU), CPU, tmp_path / "file" / "folder")
