"""The dispatch of an op on global tensors below autograd: a recipe is looked up, or made, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.tensor import spec as specs
from weft.tensor.dispatch import interleaved
from weft.tensor.dispatch.interleaved import note_aliases, note_copies
from weft.tensor.dispatch.operands import (
    Reader,
    as_global,
    common_mesh,
    on_one_placement,
    run_on_whole_copies,
    takes_slots,
)
from weft.tensor.dispatch.recipe import Recipe, make_recipe
from weft.tensor.dispatch.special_ops import honour_lazy_bits, note_views, special_handling
from weft.tensor.divergence import check_every, checking, note_op, note_write
from weft.tensor.spec import Spec

# For one op. Steps whose shapes come again need a few; those whose shapes never do must not fill the memory.
MOST_RECIPES = 256


@final
class _OpFacts:
    """The facts known of one op: how it runs differently from by a recipe, and recipes by arguments and layouts."""

    __slots__ = ("aliases", "recipes", "slots", "views", "way", "writes")

    def __init__(self, op: Any) -> None:
        self.writes = op._schema.is_mutable
        self.aliases = any(result.alias_info is not None for result in op._schema.returns)
        self.views = self.aliases and not self.writes
        self.way = special_handling(op)
        self.slots = takes_slots(op)
        self.recipes: dict[Any, Recipe] = {}

    def keep(self, key: Any, recipe: Recipe) -> Recipe:
        """Keep a recipe, and at most `MOST_RECIPES`: the one that was made first makes room."""
        if len(self.recipes) >= MOST_RECIPES:
            self.recipes.pop(next(iter(self.recipes)), None)
        self.recipes[key] = recipe
        return recipe


# Views whose elements are not elements of what they are taken of.
_OTHER_ELEMENTS = (
    torch.ops.aten.view_as_real.default,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.view.dtype,
)

# By the op's id, because the hash of an op is slow; ops live as long as the process.
_known: dict[int, _OpFacts] = {}


def dispatch(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op below autograd.

    Raises:
        RuleError: when neither the op nor its decomposition has a rule.
        LayoutError: for operands on several placements, and plain tensors that want a gradient among them; in
            strict mode for boxing.
        UserError: when torch refuses the whole tensors, or the op would reshape a tensor that is stored in shares.
    """
    honour_lazy_bits()
    known = _known.get(id(op)) or _known.setdefault(id(op), _OpFacts(op))
    in_inference = known.aliases and torch.is_inference_mode_enabled()
    viewed = _viewed(kind, known, op, args, kwargs) if in_inference else NotImplemented
    if viewed is not NotImplemented:
        return viewed
    if interleaved.in_use:
        args, kwargs, of = interleaved.with_stand_ins(kind, op, args, kwargs)
        if of:
            return interleaved.originals(dispatch(kind, op, args, kwargs), of)
    if specs.families:
        args, kwargs = on_one_placement(kind, op, args, kwargs)
    other = _other_way(kind, known, op, args, kwargs)
    if other is not NotImplemented:
        return other
    reader, key = _read(kind, known, args, kwargs)
    if reader.sparse:
        return run_on_whole_copies(kind, op, args, kwargs)
    if reader.plain:
        mesh = common_mesh(kind, op, reader.tensors)
        args = as_global(kind, op, mesh, args)
        kwargs = {name: as_global(kind, op, mesh, value) for name, value in kwargs.items()}
        reader, key = _read(kind, known, args, kwargs)
    recipe = known.recipes.get(key)
    if recipe is None:
        mesh = common_mesh(kind, op, reader.tensors)
        recipe = known.keep(key, make_recipe(op, args, kwargs, mesh, kind))
    own = [
        tensor.locals if tensor.__class__ is kind else (tensor,) * len(recipe.kernels)
        for tensor in reader.tensors
    ]
    _note(recipe, reader)
    made = _wrapped(kind, recipe, recipe.run(own, reader.floats), reader.tensors)
    if known.views:
        _note_views(kind, op, reader.tensors[0], recipe, made, lambda x: op(x, *args[1:], **kwargs))
    return made


def _note(recipe: Recipe, reader: Reader) -> None:
    """Remember what runs, which must be the same on all ranks."""
    if not recipe.mesh.in_process and recipe.mesh.ranks:
        note_op(recipe.mesh, recipe.op, recipe.token, reader.floats)
    if checking():
        check_every(recipe.mesh, f"{recipe.op} where {recipe.advice}")


def _note_views(
    kind: Any, op: Any, source: Any, recipe: Recipe, made: Any, again: Callable[[Any], Any]
) -> None:
    """Let a tensor know its views: those that share its memory, and those that are copies, taken by `again`."""
    note_aliases(kind, source, made)
    if recipe.viewed or (recipe.offsets and hasattr(source, "origin")):
        results = made if recipe.listed else [made]
        note_copies(source, results, again, elements=op not in _OTHER_ELEMENTS)


def _viewed(
    kind: Any, known: _OpFacts, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result in inference mode of an op that may give a view; NotImplemented where that runs like any other.

    torch takes a view of an ordinary tensor for an ordinary one there.
    """
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.ADInplaceOrView):
        if known.writes or args[0].is_inference():
            return NotImplemented
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(kind, op, args, kwargs)
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        note_views()  # in other modes autograd has taken it apart
        return op.decompose(*args, **kwargs)
    return NotImplemented


def _other_way(
    kind: Any, known: _OpFacts, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The result of an op that runs differently from by a recipe; NotImplemented for others."""
    if known.writes:  # which all ranks must do alike
        every = pytree.tree_leaves((args, kwargs))
        written = next((x for x in every if isinstance(x, kind)), None)
        if written is not None and not written.spec.mesh.in_process:
            numbers = [x for x in every if isinstance(x, bool | int | float)]
            plain = (x for x in every if isinstance(x, Tensor) and not isinstance(x, kind))
            note_write(written.placement, f"{op} {numbers}", plain)
    if known.way is None:
        return NotImplemented
    made = known.way(kind, op, args, kwargs)
    if known.views:
        note_aliases(kind, args[0], made)
    return made


def _read(
    kind: Any, known: _OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reader, tuple[Any, ...]]:
    reader = Reader(kind, known.slots)
    key = reader.key(args)
    if kwargs:
        key = (key, tuple(kwargs), reader.key(tuple(kwargs.values())))
    return reader, key


def _wrapped(
    kind: Any, recipe: Recipe, made: list[tuple[Tensor, ...]], operands: Sequence[Tensor]
) -> Any:
    """Global tensors from the local results of this process's ranks.

    Lazy conjugates are resolved, because code below dispatch cannot see that they are lazy.
    """
    if any(result.__class__ is Spec and result.dtype.is_complex for result in recipe.results):
        made = [tuple([x.resolve_conj() for x in part]) for part in made]
    start = operands[0].storage_offset() if recipe.offsets else 0
    offsets = [start + offset for offset in recipe.offsets] or [0] * len(recipe.results)
    if not recipe.listed:
        return kind(recipe.results[0], tuple([part[0] for part in made]), offsets[0])
    waiting = iter(range(len(recipe.results)))
    found = []
    for result in recipe.results:
        if result.__class__ is Spec:
            place = next(waiting)
            result = kind(result, tuple([part[place] for part in made]), offsets[place])
        found.append(result)
    return found
