"""Files of topologies: what is legal, and what each error says."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UserError
from weft.hardware.topology_files import parse_topology, topology

QUICK = settings(max_examples=30, deadline=None, derandomize=True)
GOOD: dict[str, Any] = {
    "weft_topology": 1,
    "name": "two nodes",
    "links": {"wire": {"gb_per_second": 10, "latency_microseconds": 1}},
    "nodes": [
        {
            "count": 2,
            "devices": {"kind": "cpu", "count": 2},
            "switches": [{"name": "s", "link": "wire", "joins": "devices"}],
            "links": [{"between": ["device0", "device1"], "link": "nvlink3", "width": 2}],
            "ports": [{"link": "wire", "count": 1}],
        }
    ],
    "network": [{"name": "top"}],
}


def test_what_it_says():
    found = parse_topology(GOOD, "file")
    assert (found.name, len(found)) == ("two nodes", 4)
    assert [found.node(device) for device in range(4)] == [0, 0, 1, 1]
    assert found.kind(3).name == "cpu"
    with pytest.raises(IndexError):
        found.node(4)
    assert [kind.name for kind in found.link_kinds] == ["wire", "nvlink3"]


def changed(path, value):
    content = deepcopy(GOOD)
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return content


NODE = ("nodes", 0)
WIRE = ("links", "wire")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("weft_topology",), 2, "weft_topology must be 1, got 2"),
        (("weft_topology",), True, "weft_topology must be 1, got True"),
        ((*WIRE, "gb_per_second"), 1e-300, "gb_per_second must be a number above 1e-09"),
        (("nods",), [], "no field is named 'nods'; did you mean 'nodes'?"),
        (("name",), 3, "name must be a text, got 3"),
        (("nodes",), [], "nodes must have 1 to 1024 entries, got 0"),
        (("nodes",), {}, r"nodes must be a list, got \{\}"),
        ((*NODE, "devices", "kind"), "h200", "no device kind is named 'h200'"),
        ((*NODE, "devices", "count"), 0, "count must be a whole number from 1"),
        ((*NODE, "count"), 2.5, "count must be a whole number from 1 to 1048576, got 2.5"),
        ((*NODE, "ports"), None, "device0 reaches no port, and there are other nodes"),
        (
            (*NODE, "ports", 0, "link"),
            "wirre",
            "no link kind is named 'wirre'; did you mean 'wire'?",
        ),
        (
            (*NODE, "ports", 0, "count"),
            3,
            "count must be a whole number from 1 to 2, got 3",
        ),
        (
            (*NODE, "ports", 0, "at"),
            ["device9"],
            "give the vertices that a port is at, or a count, not both",
        ),
        ((*NODE, "links", 0, "between"), ["device0", "devise1"], "did you mean 'device1'?"),
        ((*NODE, "links", 0, "between"), ["device0"], "between must have 2 entries, got 1"),
        ((*NODE, "links", 0, "between"), ["s", "s"], "a link from 's' to itself"),
        ((*NODE, "links", 0, "width"), 0, "width must be a number above 0"),
        ((*NODE, "links", 0, "one_way"), "yes", "one_way must be true or false, got 'yes'"),
        ((*NODE, "switches", 0, "name"), "device1", "got 'device1' twice"),
        ((*NODE, "switches", 0, "joins"), [["s"]], r"joins\[0\] must be a text, got \['s'\]"),
        ((*WIRE, "gb_per_second"), 0, "gb_per_second must be a number above 1e-09"),
        ((*WIRE, "gb_per_second"), -1, "gb_per_second must be a number above 1e-09"),
        ((*WIRE, "gb_per_second"), float("nan"), "got nan"),
        ((*WIRE, "gb_per_second"), float("inf"), "got inf"),
        ((*WIRE, "gb_per_second"), "fast", "got 'fast'"),
        ((*WIRE, "gb_per_second"), True, "got True"),
        ((*WIRE, "latency_microseconds"), -1, "latency_microseconds must be a number from 0"),
        ((*WIRE, "protocols"), {}, "protocols must have 1 to 16 entries, got 0"),
        (
            (*WIRE, "protocols"),
            {"a": {"share": 1.5}},
            "share must be a number above 1e-06 and at most 1",
        ),
        ((*WIRE, "protocols"), {"mine": {}}, r"protocol in common, got wire \(mine\), nvlink3"),
        (("network",), [], "2 nodes need at least one level"),
        (("network",), [{"name": "leaf", "nodes": 1}], "the top level joins 1 of 2 nodes"),
        (("network", 0, "oversubscription"), 0, "oversubscription must be a number above 0"),
        (
            ("network",),
            [{"name": "a", "uplink_gb_per_second": 1, "oversubscription": 2}],
            "or oversubscription, not both",
        ),
        (("devices",), 0, "devices must be a whole number from 1"),
    ],
)
def test_bad_fields(path, value, message):
    with pytest.raises(UserError, match=message):
        parse_topology(changed(path, value), "file")


def test_groups_of_groups():
    levels: list[dict[str, Any]] = [
        {"name": "a", "nodes": 2},
        {"name": "b", "nodes": 3},
        {"name": "c"},
    ]
    content = {**changed(("nodes", 0, "count"), 8), "network": levels}
    with pytest.raises(UserError, match="groups of 3 nodes are not made of whole groups of 2"):
        parse_topology(content, "file")
    levels[1]["nodes"] = 4
    assert len(parse_topology(content, "file").levels) == 3
    # Levels above all nodes switch nothing.
    assert len(parse_topology({**GOOD, "network": levels}, "file").levels) == 1


def test_devices_do_not_pass_bytes_on():
    row = {
        "devices": {"kind": "cpu", "count": 3},
        "links": [
            {"between": ["device0", "device1"], "link": "wire"},
            {"between": ["device1", "device2"], "link": "wire"},
        ],
    }
    with pytest.raises(
        UserError, match="no links lead from device0 to device2; bytes pass through"
    ):
        parse_topology({**GOOD, "nodes": [row]}, "file")
    row["switches"] = [{"name": "s", "link": "wire", "joins": "devices"}]
    row["links"] = [{"between": ["device0", "device1"], "link": "wire", "one_way": True}]
    assert len(parse_topology({**GOOD, "nodes": [row]}, "file")) == 3


def test_sizes():
    assert len(parse_topology(GOOD, "file", 3)) == 3
    assert len(parse_topology(GOOD, "file", 7)) == 7
    assert parse_topology(GOOD, "file", 7).groups[0].count == 4
    assert parse_topology(GOOD, "file", 2).levels == ()
    two_kinds = {**GOOD, "nodes": GOOD["nodes"] * 2}
    assert len(parse_topology(two_kinds, "file", 5).groups) == 2
    with pytest.raises(UserError, match="there are 8 devices in nodes of 2 kinds, and 9 are asked"):
        parse_topology(two_kinds, "file", 9)


def test_a_whole_machine_as_one_graph():
    devices = [{"kind": "cpu", "name": f"d{place}", "node": place // 2} for place in range(4)]
    node = {
        "devices": devices,
        "switches": [{"name": "s", "link": "wire", "joins": "devices"}],
    }
    found = parse_topology({**GOOD, "nodes": [node], "network": []}, "file")
    assert [found.node(device) for device in range(4)] == [0, 0, 1, 1]
    devices[3]["node"] = 5
    with pytest.raises(UserError, match="node must be 0, 1, … in the order of the devices"):
        parse_topology({**GOOD, "nodes": [node], "network": []}, "file")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(("devices", "device0", "s", "wire", "any", "cpu", "nodes", "link")),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(content, path=()):
    """Every path into nested data."""
    yield path
    entries = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, inner in entries:
        yield from places(inner, (*path, key))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), JUNK)
def test_only_user_errors_leave_the_parser(data, junk):
    paths = [path for path in places(GOOD) if path]
    content = changed(data.draw(st.sampled_from(paths)), junk)
    assert_read(lambda: parse_topology(content, "file"), "file: ")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.text(max_size=12))
def test_only_user_errors_leave_the_reader(tmp_path_factory, data, text):
    whole = yaml.safe_dump(GOOD)
    place = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("files") / "topology.yaml"
    path.write_text(whole[:place] + text + whole[place + data.draw(st.integers(0, 5)) :], "utf-8")
    assert_read(lambda: topology(path), str(path))


def assert_read(read, begin):
    """A topology, or a UserError that says where."""
    try:
        found = read()
    except UserError as error:
        found = error
    assert str(found).startswith(begin) if isinstance(found, UserError) else len(found) >= 1
