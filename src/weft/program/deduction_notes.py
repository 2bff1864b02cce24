"""What `Program.explain` says about deduction: whether no layouts could cost less, a line for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.compiler.stages_join import Deduced


def deduction_notes(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Whether the layouts are proven cheapest, by the costs that deduction counts in."""
    for each in deduced:
        where = "layouts" if len(deduced) == 1 else f"layouts of stage {each.stage}"
        if each.proven:
            known = "proven cheapest, along each axis with the others as they are"
        else:
            over = (each.cost - each.bound) / abs(each.bound) if each.bound else 1.0
            known = f"not proven cheapest; along the last axis at most {over:.2%} above the bound"
        yield f"{where}: {known}"
