"""The batches of a program's loops: loaded and cut ahead of their steps, where that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from weft.capture.batch import is_dense
from weft.capture.tree import flatten, unflatten
from weft.ir.plan import RankPlan
from weft.program.data.loader import Loader, taken_ahead
from weft.program.data.loading import Ahead, loaded_ahead, with_waits
from weft.program.data.loading_plan import loading_plan
from weft.program.feeding.cut import CutBatch, is_on_the_host
from weft.program.feeding.rows import RowsOfBatch
from weft.program.parts.core import ProgramCore
from weft.runtime.memory.arrival import ahead_of_use
from weft.tensor import GlobalTensor


def batches_of(core: ProgramCore, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
    """The batches in order, of which up to `ahead` are loaded, and cut, before they are asked for.

    A batch is as it was when it was loaded, whatever becomes of its tensors then; a list's are read by their steps.
    The core is told the acts that load, and how long each batch was waited for.
    """
    return with_waits(_loaded(core, batches, ahead), core.note_wait)


def _loaded(core: ProgramCore, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
    way = _way(core, ahead) if ahead else None
    if isinstance(batches, Loader):
        return taken_ahead(batches, way)
    if way is None or isinstance(batches, list | tuple):
        return iter(batches)
    items = iter(batches) if _are_new(batches) else map(_copied, batches)
    return loaded_ahead(items, way.plan(None), way.cut, way.note)


def _are_new(batches: Iterable[Any]) -> bool:
    """True where each batch comes from another process, so that nobody writes into it any more."""
    if not isinstance(batches, DataLoader) or type(batches).__iter__ is not DataLoader.__iter__:
        return False
    return batches.num_workers > 0


def _way(core: ProgramCore, ahead: int) -> Ahead:
    def plan(rows: Sequence[int] | None) -> RankPlan:
        feeder = core.variants.current.feeder
        core.loading = loading_plan(feeder.first, feeder.loaded_leaves(rows), ahead)
        return core.loading

    return Ahead(plan, partial(_cut, core), core.note_load)


def _cut(core: ProgramCore, batch: Any) -> Any:
    """The batch, cut for its step; as it is where it cannot be cut yet.

    What fails here is done again by the step, which tells of it. Where processes bring parts of a batch, making it
    whole takes all of them.
    """
    setting = core.setting
    try:
        by_rows = setting.by_rows and not isinstance(batch, RowsOfBatch)
        if by_rows or not is_on_the_host(batch):
            return batch
        with torch.no_grad(), ahead_of_use(map(setting.world.device, setting.variables)) as arrival:
            whole = setting.whole(batch)
            found = core.variants.cut(whole)
    except Exception:
        return batch
    return batch if found is None else CutBatch(whole, *found, arrival)


def _copied(batch: Any) -> Any:
    """The batch with tensors of its own: an iterable may write the next one into the same memory."""
    if isinstance(batch, RowsOfBatch):
        return replace(batch, batch=_copied(batch.batch))
    try:
        found, tree = flatten(batch, "batch")
    except Exception:  # its step says why
        return batch
    return unflatten([_copy(leaf) for _, leaf in found], tree)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    with torch.no_grad():
        if isinstance(leaf, GlobalTensor):
            return GlobalTensor(leaf.spec, tuple(each.clone() for each in leaf.locals))
        return leaf.clone() if is_dense(leaf) else leaf
