"""Texts of calls: equal ones take equally long."""

from __future__ import annotations

from typing import Any

import build
from build import value
from weft.hardware import default_device
from weft.hardware.costs import Cost
from weft.hardware.durations import Durations, call_text, makers_of, view_texts
from weft.ir.plan import Compute, LocalCall, LocalUpdate
from weft.units import Seconds

X, W = value("x", 6, 4), value("w", 5, 4)
FLAT = build.call("aten.view.default", (W.ref, (20,)), value("flat", 20))
AGAIN = build.call("aten.view.default", (value("flat", 20).ref, (5, 4)), value("again", 5, 4))
TURNED = build.call("aten.transpose.int", (value("again", 5, 4).ref, 0, 1), value("turned", 4, 5))
NODES = (FLAT, AGAIN, TURNED)
VALUES = {v.name: v for v in (X, W, *(v for node in NODES for v in node.makes))}
TURNED_TEXT = "aten.transpose.int(float32[5, 4], 0, 1)"


def text(node: LocalCall) -> str:
    return call_text(node.first, view_texts(node, makers_of(NODES), VALUES))


def test_views_that_lie_in_order_are_plain_tensors() -> None:
    product = build.call("aten.mm.default", (X.ref, value("again", 5, 4).ref), X)
    assert text(product) == "aten.mm.default(float32[6, 4], float32[5, 4])"


def test_other_views_are_named() -> None:
    product = build.call("aten.mm.default", (X.ref, value("turned", 4, 5).ref), X)
    assert text(product) == f"aten.mm.default(float32[6, 4], {TURNED_TEXT})"
    assert call_text(product.first) == ("aten.mm.default(float32[6, 4], float32[4, 5])")


def test_a_view_in_order_of_one_that_is_not_is_named_too() -> None:
    flat = build.call(
        "aten.reshape.default", (value("turned", 4, 5).ref, (20,)), value("reshaped", 20)
    )
    values = {**VALUES, "reshaped": value("reshaped", 20)}
    read = build.call("aten.neg.default", (value("reshaped", 20).ref,), value("made", 20))
    lies = view_texts(read, makers_of((*NODES, flat)), values)
    assert lies == (f"aten.reshape.default({TURNED_TEXT}, [20])",)


class Noting:
    """The usual device, whose updates take a second for each that runs together with them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(default_device("cpu"), name)

    def of_update(self, rank: int, rule: str, moved: int, together: int = 1) -> Cost:
        return Cost(Seconds(float(together)))


def test_updates_of_one_rule_run_together_and_calls_alone() -> None:
    rules = ("SGD", "Adam", "SGD", "SGD")
    parts = [LocalUpdate(rule, "x", "x", (), 0, f"x{place}") for place, rule in enumerate(rules)]
    act = Compute(0, (*parts, FLAT), (), ())
    *updates, call = Durations(Noting(), ()).of_act(act, VALUES, 0, makers_of(NODES))
    assert [cost.seconds for cost in updates] == [3.0, 1.0, 3.0, 3.0]
    assert call.seconds == Durations(default_device("cpu"), ()).node(FLAT, VALUES)
