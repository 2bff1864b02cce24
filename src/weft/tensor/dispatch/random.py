"""Random ops on global tensors: the same numbers in every layout, on any number of ranks.

Every draw takes the next number of a counter that runs alike on all ranks, and draws by global
position (`weft.runtime.random`).
"""

from __future__ import annotations

from typing import Any, final

import torch

from weft.capture.fx.private import DispatchMode
from weft.errors import wrong
from weft.layout import Layout, broadcast_layout
from weft.runtime.random import uniform
from weft.runtime.world.world import World
from weft.tensor.chain import Locals
from weft.tensor.divergence import note_made
from weft.tensor.mesh import Mesh
from weft.tensor.spec import Spec, contiguous, without_partials


@final
class _Stream:
    """The seed, and how many draws it has served."""

    def __init__(self) -> None:
        self.given: int | None = None
        self.seed: int | None = None
        self.count = 0

    def next(self, world: World) -> tuple[int, int]:
        """The seed and the number of the next draw."""
        seed = torch.initial_seed() if self.given is None else self.given
        if seed != self.seed:
            _check_seed(world, seed)
            self.seed, self.count = seed, 0
        self.count += 1
        return seed, self.count - 1


def _check_seed(world: World, seed: int) -> None:
    """Check that all ranks begin to draw from the same seed; all processes must call it alike."""
    if world.several:
        world.check_process()
        world.calls.enter("the first draw from a seed of global tensors")
        texts = dict.fromkeys(world.ranks, str(seed))
        world.check_same(texts, "the seed of global tensors (torch.manual_seed, weft.manual_seed)")


_stream = _Stream()


def manual_seed(seed: int | None) -> None:
    """Seed the random ops on global tensors; call it with the same seed on every rank.

    This starts the numbers anew each time. With None, and as long as it was never called, they use
    torch's seed, and start anew when `torch.manual_seed` is called with another one; with the same
    one they go on, as they take nothing from torch's generator that could tell. What a compiled step
    draws depends on the `seed` of `weft.compile` alone, neither on this nor on `torch.manual_seed`.

    Raises:
        UserError: the seed is no whole number.
    """
    if seed is not None and type(seed) is not int:
        raise wrong("weft.manual_seed: seed", "a whole number or None", seed)
    _stream.given, _stream.seed = seed, None


@final
class Drawing(DispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, `weft.uniform` makes global tensors.

    Args:
        kind: the class of global tensors.
        mesh: where.
        layout, shape: a draw of this shape lies so, Partial taken as Broadcast; every other one is
            Broadcast.
    """

    def __init__(self, kind: Any, mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._kind = kind
        self._mesh = mesh
        self._layout = without_partials(layout)
        self._shape = tuple(shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.weft.uniform.default:
            return func(*args, **(kwargs or {}))
        size = tuple(args[0])
        layout = self._layout
        if size != self._shape:
            layout = broadcast_layout(self._mesh.placement)
        return self._kind(*_draw(size, layout, self._mesh, kwargs["dtype"]))


def _draw(
    size: tuple[int, ...], layout: Layout, mesh: Mesh, dtype: torch.dtype
) -> tuple[Spec, Locals]:
    seed, salt = _stream.next(mesh.world)
    note_made(mesh, "weft.uniform", seed, salt, size)
    parts = []
    for rank in mesh.ranks:
        ranges = layout.local_ranges(size, rank)
        offset, length = [first for first, _ in ranges], [count for _, count in ranges]
        device = mesh.device_of(rank)
        parts.append(uniform(seed, 0, size, offset, length, salt, dtype=dtype, device=device))
    return contiguous(mesh, layout, size, dtype), tuple(parts)
