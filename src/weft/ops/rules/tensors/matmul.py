"""Matrix products: linear in each factor; a bias that is added must be Partial when the contraction is split."""

from __future__ import annotations

from typing import Any

from weft.ops.rule import aten, rule
from weft.ops.rules.common import EITHER

BIASED: dict[str, Any] = {"linear": ((0, 1), (0, 2)), "added": (0,)}

# `weft.class_scores` is what a product that makes split logits becomes (`weft.compiler.families.class_loss`).
rule((*aten("mm"), "weft.class_scores"), "m k+, k n -> m n", linear=EITHER)
rule(aten("bmm"), "b m k+, b k n -> b m n", linear=EITHER)
rule(aten("matmul"), "... m k+, ... k n -> ... m n", linear=EITHER)
rule(aten("addmm"), "m n, m k+, k n -> m n", **BIASED)
rule(aten("baddbmm"), "b m n, b m k+, b k n -> b m n", **BIASED)
rule(aten("addmv"), "m, m k+, k -> m", **BIASED)
rule(aten("dot vdot"), "k+, k -> ", linear=EITHER)
rule(aten("mv"), "m k+, k -> m", linear=EITHER)
rule(aten("outer"), "m, n -> m n", linear=EITHER)
rule(aten("linear"), "... k+, n k, n -> ... n", linear=((0, 2), (1, 2)), added=(2,))
rule(aten("_cdist_forward"), "... m 1, ... n 1 -> ... m n")
rule(aten("_cdist_backward"), "... m n+, ... m 1, ... n 1, _, ... m n -> ... m 1", linear=((0,),))
