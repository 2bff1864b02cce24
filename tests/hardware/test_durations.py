"""Texts of calls: equal ones take equally long."""

from __future__ import annotations

import build
from build import value
from weft.hardware.durations import call_text, lying, makers_of
from weft.ir.plan import LocalCall

X, W = value("x", 6, 4), value("w", 5, 4)
FLAT = build.call("aten.view.default", (W.ref, (20,)), value("flat", 20))
AGAIN = build.call("aten.view.default", (value("flat", 20).ref, (5, 4)), value("again", 5, 4))
TURNED = build.call("aten.transpose.int", (value("again", 5, 4).ref, 0, 1), value("turned", 4, 5))
NODES = (FLAT, AGAIN, TURNED)
VALUES = {v.name: v for v in (X, W, *(v for node in NODES for v in node.makes))}
TURNED_TEXT = "aten.transpose.int(float32[5, 4], 0, 1)"


def text(node: LocalCall) -> str:
    return call_text(node.first, lying(node, makers_of(NODES), VALUES))


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
    lies = lying(read, makers_of((*NODES, flat)), values)
    assert lies == (f"aten.reshape.default({TURNED_TEXT}, [20])",)
