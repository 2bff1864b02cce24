"""The plan of the way of a batch to its step: actors that load and cut, and registers whose credits say how far ahead.

    load    on "load"     takes the next batch of the loader's workers
    copy    on "copies"   cuts it to the parts of the ranks of this process, on their devices
    step    on "compute"  hands them to the thread that steps

They act once a step. With credits for one batch alone there is no copy: the step cuts what was loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from weft.ir.legal.plans import verify_plan
from weft.ir.plan import (
    COMPUTE,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)
from weft.layout.layout import region_shape
from weft.program.feeding.feed import LoadedLeaf

# The queues beside that of the step.
LOAD, COPIES = "load", "copies"
# Stands where a batch has no tensors: the actors wait for each other all the same.
_EMPTY = ((0,), "bool")


def loading_plan(rank: int, leaves: Sequence[LoadedLeaf], ahead: int) -> RankPlan:
    """The plan by which one process loads.

    Args:
        rank: the first of this process.
        leaves: of the batch.
        ahead: how many batches may be loaded before their step, 1 at least: the credits of all registers together.
    """
    cuts = ahead > 1
    loaded = [LocalValue(each.name, each.shape, each.dtype) for each in leaves]
    kind: RegisterKind = "batch" if loaded else "control"
    loaded = loaded or [LocalValue("batch", *_EMPTY)]
    names = tuple(value.name for value in loaded)
    keys = tuple(each.key for each in leaves) or ("batch",)
    feed = Feed(0, keys, names, LOAD)
    if not cuts:
        fetch = Fetch(1, keys, names, COMPUTE)
        registers = [Register(value, kind, 0, (1,), ahead) for value in loaded]
        return verify_plan(RankPlan(rank, (), (feed, fetch), tuple(registers)))
    parts = list(_parts(leaves, names))
    made = [value for _, _, value in parts] or [LocalValue("parts", *_EMPTY)]
    taken = tuple(value.name for value in made)
    told = tuple(key for key, _, _ in parts) or ("parts",)
    copy = Compute(1, tuple(call for _, call, _ in parts), names, taken, COPIES)
    fetch = Fetch(2, told, taken, COMPUTE)
    registers = [Register(value, kind, 0, (1,), ahead - 1) for value in loaded]
    kind = "batch" if parts else "control"
    registers += [Register(value, kind, 1, (2,)) for value in made]
    return verify_plan(RankPlan(rank, (), (feed, copy, fetch), tuple(registers)))


def _parts(
    leaves: Iterable[LoadedLeaf], taken: Collection[str]
) -> Iterator[tuple[str, LocalCall, LocalValue]]:
    """For each part that a rank takes: a key, the call that cuts it, and what it makes."""
    known = set(taken)
    for leaf in leaves:
        for rank, region in leaf.parts.items():
            name = f"rank{rank}.{leaf.name}"
            while name in known:  # a leaf of the user's is called so
                name += "_"
            known.add(name)
            part = LocalValue(name, region_shape(region), leaf.dtype)
            kwargs = (("device", leaf.devices[rank]),) if rank in leaf.devices else ()
            call = LocalCall.of(
                "weft.part",
                (LocalValue(leaf.name, leaf.shape, leaf.dtype).ref, region),
                (part,),
                kwargs=kwargs,
            )
            yield f"{leaf.key} of rank {rank}", call, part
