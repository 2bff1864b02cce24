"""Repeated layers in lists of local calls."""

from __future__ import annotations

from itertools import pairwise

import build
from build import ref
from weft.compiler.plans.specialize import outline, repeats
from weft.ir.plan import Compute, LocalUpdate, RankPlan
from weft.runtime.compiled.parts import part_of


def call(op, args, made, shape=(2,)):
    return build.call(f"aten.{op}", args, made, shape=shape)


def layer(number, before):
    """Five calls from value `before` to the value `x{number}`."""
    name = "{}{}".format
    return [
        call("mm", (ref(before), ref(name("w", number))), name("a", number)),
        call("relu", (ref(name("a", number)),), name("b", number)),
        call("mm", (ref(name("b", number)), ref(name("u", number))), name("c", number)),
        call("mul", (ref(name("c", number)), 0.5), name("d", number)),
        call("add", (ref(name("d", number)), ref(before)), name("x", number)),
    ]


def model(layers):
    first = [call("embedding", (ref("table"), ref("tokens")), "x-1", (3,))]
    body = [each for n in range(layers) for each in layer(n, f"x{n - 1}")]
    return [*first, *body, call("sum", (ref(f"x{layers - 1}"),), "loss", ())]


def parts(calls, fewest):
    places = [0, *repeats(calls, fewest), len(calls)]
    runs = [calls[start:end] for start, end in pairwise(places)]
    every = [part_of(run, {f"x{n}" for n in range(-1, 99)} | {"loss"}) for run in runs]
    return runs, every


def test_cuts_stand_between_layers():
    assert repeats(model(4), 5) == [1, 6, 11, 16, 21]


def test_layers_have_one_form_however_many():
    for layers in (3, 12):
        _, every = parts(model(layers), 5)
        assert len(every) == layers + 2
        assert len({part.form for part in every}) == 3
    part = every[5]
    assert part.inputs == ("x3", "w4", "u4")
    assert part.outputs == ("x4",)
    assert part.form.inputs == ("i0", "i1", "i2")
    assert part.form.outputs == ("v4",)
    assert [each.op for each in part.form.calls] == [each.op for each in layer(0, "x")]


def test_short_repeats_are_taken_together():
    runs, every = parts(model(7), 10)
    assert [len(run) for run in runs] == [1, 10, 10, 10, 5, 1]
    assert len({part.form for part in every[1:4]}) == 1


def test_what_repeats_is_long_enough_for_two_parts():
    assert repeats(model(4), 10) == [1, 11, 21]
    assert repeats(model(2), 10) == []


def test_constants_of_other_types_are_others():
    """1 and 1.0 are equal, but make other results."""
    calls = model(4)
    calls[9] = call("mul", (ref("c1"), 1.0), "d1")
    calls[14] = call("mul", (ref("c2"), 1), "d2")
    calls[4], calls[19] = (call("mul", (ref(f"c{n}"), True), f"d{n}") for n in (0, 3))
    assert repeats(calls, 5) == []


def test_what_leaves_a_part_belongs_to_its_form():
    run = layer(0, "x")
    alone, seen = part_of(run, {"x0"}), part_of(run, {"x0", "b0"})
    assert alone.form != seen.form
    assert seen.outputs == ("b0", "x0")


def test_calls_that_differ_are_no_repeats():
    one, other = layer(0, "x"), layer(1, "x0")
    other[3] = call("mul", (ref("c1"), True), "d1")
    assert repeats([*one, *other], 2) == []
    other[3] = call("mul", (ref("c1"), 0.5), "d1", (4,))
    assert repeats([*one, *other], 2) == []
    assert repeats([*one, *layer(1, "x0")], 2) == [5]


def test_segments_are_marked_where_parts_begin():
    """Places count all nodes of a segment; one that begins a part is not marked."""
    calls = model(4)
    assert repeats(calls, 5) == [1, 6, 11, 16, 21]
    update = LocalUpdate("copy", "w0", "x-1", (), 0, "w0")
    first, second = (calls[0], update, *calls[1:11]), tuple(calls[11:])
    plan = RankPlan(
        0, (), tuple(Compute(n, run, (), ()) for n, run in enumerate((first, second))), ()
    )
    assert [actor.parts for actor in outline(plan, fewest=5).actors] == [(2, 7), (5, 10)]
