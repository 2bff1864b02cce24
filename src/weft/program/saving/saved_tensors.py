"""The tensors of a program that a checkpoint holds, under the names of a single device, and who writes what of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

from torch import Tensor, nn

from weft.errors import UserError
from weft.layout import Layout, Shares
from weft.layout.layout import Region, region_size
from weft.units import ITEM_SIZE


@final
@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a program.

    Attributes:
        name: in the checkpoint; tied tensors have several.
        key: of the program's variable.
        shape, dtype: whole shape, and dtype as text.
        layout: how it lies.
        shares: in which its parts are stored; None for the usual order.
        parts: of the ranks of this process that hold one.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    shares: Shares | None
    parts: Mapping[int, Tensor]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank holds."""
        return pieces_of(self.shape, self.layout, self.shares, rank)

    @property
    def bytes(self) -> int:
        """Of one rank's part, about."""
        ranks = self.layout.placement.ranks
        found = ITEM_SIZE.get(self.dtype, 8)
        for size in self.layout.local_shape(self.shape, ranks[0]):
            found *= size
        return found


def writers(entries: Iterable[SavedTensor]) -> dict[tuple[str, int], tuple[Piece, ...]]:
    """The pieces that each rank writes, by the name of an entry and the rank: each element of each entry once.

    Of ranks that hold the same, the one that has least to write until then; so it is the same on all processes.
    """
    load: dict[int, int] = {}
    found: dict[tuple[str, int], tuple[Piece, ...]] = {}
    for entry in entries:
        alike: dict[tuple[Piece, ...], list[int]] = {}
        for rank in entry.layout.placement.ranks:
            alike.setdefault(entry.pieces(rank), []).append(rank)
        for pieces, ranks in alike.items():
            if pieces:
                least = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
                load[least] = load.get(least, 0) + entry.bytes
                found[entry.name, least] = pieces
    return found


# The extra of a checkpoint under which it stands.
MODULES = "weft.modules"


def with_module_states(extra: Mapping[str, Any] | None, model: nn.Module) -> Mapping[str, Any]:
    """The user's extra, with what modules keep, by their names.

    Raises:
        UserError: the user has an extra of that name, or a module gives none.
    """
    given = {} if extra is None else extra
    if not isinstance(given, Mapping):
        return given  # it is refused where it is saved
    if MODULES in given:
        raise UserError(
            f"what get_extra_state() of modules gives stands among the extras as {MODULES!r}; give yours another name"
        )
    found = {name: _given(name, module) for name, module in _keeping(model).items()}
    return {**given, MODULES: found} if found else given


def put_module_states(extra: dict[str, Any], model: nn.Module) -> None:
    """Take out of the extras what modules keep, and give it to them."""
    saved = extra.pop(MODULES, {})
    for name, module in _keeping(model).items():
        if name in saved:
            try:
                module.set_extra_state(saved[name])
            except Exception as error:
                raise UserError(
                    f"program.load: set_extra_state() of {name or 'the model'}, a {type(module).__name__}, cannot take "
                    f"what was saved of it: {type(error).__name__}: {error}"
                ) from error


def _given(name: str, module: nn.Module) -> Any:
    try:
        return module.get_extra_state()
    except Exception as error:
        raise UserError(
            f"get_extra_state() of {name or 'the model'}, a {type(module).__name__}, gives nothing to save: "
            f"{type(error).__name__}: {error}"
        ) from error


def _keeping(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that keep something, by name."""
    own = nn.Module.get_extra_state
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(type(module), "get_extra_state", own) is not own
    }


@final
@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Attributes:
        whole: where it lies in the tensor, (offset, length) of each dimension.
        local: where it lies in the part of the rank that holds it.
    """

    whole: Region
    local: Region


def pieces_of(
    shape: tuple[int, ...], layout: Layout, shares: Shares | None, rank: int
) -> tuple[Piece, ...]:
    """The pieces of a tensor of whole `shape` that a rank holds, none of them empty; its part lies in `shares`."""
    region = layout.local_ranges(shape, rank)
    if not region_size(region):
        return ()
    local = tuple((0, length) for _, length in region)
    if shares is None:
        return (Piece(region, local),)
    dim = shares.dim
    return tuple(
        Piece(
            (*region[:dim], (place, length), *region[dim + 1 :]),
            (*local[:dim], (offset, length), *local[dim + 1 :]),
        )
        for place, offset, length in _runs(shares, *region[dim])
    )


def _runs(shares: Shares, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The runs of a stretch of a dimension that is stored in shares: place as users know it, offset in it, length."""
    end, stored = start + length, 0
    begins = (0, *accumulate(shares.parts))
    for block in range(shares.blocks):
        for begin, part in zip(begins, shares.parts, strict=False):
            own = part // shares.blocks
            first, last = max(stored, start), min(stored + own, end)
            if first < last:
                yield begin + block * own + first - stored, first - start, last - first
            stored += own
