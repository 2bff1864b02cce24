"""What `Program.explain` says about deduction: whether no layouts could cost less, a line for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.compiler.stages_join import Deduced


def deduction_notes(deduced: Sequence[Deduced]) -> Iterator[str]:
    """Whether the layouts are proven cheapest, by the costs that deduction counts in."""
    for each in deduced:
        where = "layouts" if len(deduced) == 1 else f"layouts of stage {each.stage}"
        yield f"{where}: {_known(each)}"
        if each.broken:
            yield (
                f"{where}: {each.broken} uses of parameters depart from the strategy's layouts, because "
                "their ops admit nothing else"
            )


def _known(deduced: Deduced) -> str:
    if deduced.taken:
        return f"taken over from a batch of another shape, for which they were {_found(deduced)}"
    return _found(deduced)


def _found(deduced: Deduced) -> str:
    if deduced.proven:
        return "proven cheapest, parameters in shards as if whole, each axis with the others as they are"
    if deduced.bound <= 0:
        return "not proven cheapest, and no bound is known"
    over = deduced.cost / deduced.bound - 1
    return f"not proven cheapest; along the axis solved last at most {over:.2%} above the bound"
