"""A loss's log-probabilities and gradient are written over the logits, where nobody else needs these."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from build import call, refs
from weft.ir.alias import overwritten, with_overwrites
from weft.ir.plan import LocalCall

SHAPE = (6, 5)


def step(*, logits: str = "aten.mm.default", dtype: str = "float32") -> list[LocalCall]:
    """Logits, log-probabilities, loss and the gradient of the logits, which makes that of a weight."""
    return [
        call(logits, refs("x", "w"), "logits", shape=SHAPE),
        call("aten.reshape.default", (*refs("logits"), list(SHAPE)), "flat", shape=SHAPE),
        call("aten._log_softmax.default", (*refs("flat"), 1, False), "scores", shape=SHAPE),
        call("aten.nll_loss_forward.default", (*refs("scores", "y"), None, 2, -100), "loss", "n"),
        call(
            "weft.cross_entropy_backward",
            (*refs("one", "scores", "y"), None, 2, -100, *refs("n")),
            "grad",
            shape=SHAPE,
        ),
        call("aten.mm.default", refs("grad", "x"), "made"),
    ]


def test_scores_and_gradient_take_the_memory_of_the_logits() -> None:
    calls = step()
    over = overwritten(calls, ("made", "loss"))
    assert over == {2: "flat", 4: "scores"}
    bases = with_overwrites({"flat": "logits"}, calls, over)
    assert bases == {"flat": "logits", "scores": "logits", "grad": "logits"}
    assert with_overwrites({"flat": "logits", "t": "grad"}, calls, over)["t"] == "logits"


READ_LATER = call("aten.exp.default", refs("logits"), "again")
READ_SCORES = call("aten.exp.default", refs("scores"), "again")
VIEW = call("aten.t.default", refs("logits"), "turned")


@pytest.mark.parametrize(
    ("calls", "leaving", "expected"),
    [
        (step(), ("made", "logits"), {4: "scores"}),
        (step(), ("made", "flat"), {4: "scores"}),
        (step(), ("made", "scores"), {2: "flat"}),
        ([*step(), READ_LATER], ("made",), {4: "scores"}),
        ([*step(), READ_SCORES], ("made",), {2: "flat"}),
        ([step()[0], VIEW, *step()[1:]], ("made", "turned"), {5: "scores"}),
        (step(logits="aten.add.Tensor"), ("made",), {4: "scores"}),  # may lie in any order
        (step()[1:], ("made",), {3: "scores"}),  # logits of elsewhere
        (step()[:4], ("loss",), {}),  # no backward that is joined
        (step()[4:], ("made",), {}),
    ],
    ids=[
        *("logits leave", "view leaves", "scores leave", "logits read", "scores read"),
        *("turned", "sums", "given", "forward", "backward"),
    ],
)
def test_what_is_needed_later_stays(
    calls: Sequence[LocalCall], leaving: Sequence[str], expected: dict[int, str]
) -> None:
    assert overwritten(calls, leaving) == expected


def test_another_dtype_takes_memory_of_its_own() -> None:
    calls = step()
    (logits,) = calls[0].makes
    narrow = call("aten.mm.default", refs("x", "w"), type(logits)("logits", SHAPE, "bfloat16"))
    flat = call(
        "aten.reshape.default",
        (*refs("logits"), list(SHAPE)),
        type(logits)("flat", SHAPE, "bfloat16"),
    )
    assert overwritten([narrow, flat, *calls[2:]], ("made",)) == {4: "scores"}
