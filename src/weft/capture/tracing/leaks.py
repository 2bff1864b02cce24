"""Tensors without data and unbacked numbers that a trace leaves in the user's objects.

A step may store its results anywhere: in an `lru_cache`, a default argument, an attribute of an object with slots.
`weft.capture.tracing.mutations.mutations_undone` looks at what the step names; the rest is found here by what is
alive after the capture, taken out again, and refused unless it is a cache that each step makes again.
"""

from __future__ import annotations

import gc
import sys
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from typing import Any, final

import torch
from torch import nn

from weft.capture.fx.private import FakeMode, forget_values, is_fake, living_fakes, maker_in
from weft.capture.python.caches import depending
from weft.capture.python.recorder import attributes_of
from weft.capture.python.unbacked import UnbackedNumber, living_numbers
from weft.errors import CaptureError
from weft.files import in_library

# How many containers deep a tensor is looked for, and how many of them are followed.
_DEPTH, _MANY = 12, 2000
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LIBRARIES = ("torch", "weft", "builtins", "weakref", "_thread", "functools", "contextlib")


@final
class FakeTensorLeaks:
    """The tensors without data that a capture makes: they are alive no longer than their mode, which each refers to."""

    def __init__(self) -> None:
        self._mode: Callable[[], FakeMode | None] = lambda: None
        self._module: torch.fx.GraphModule | None = None
        self._inputs: list[torch.fx.Node] = []
        self._dependent: set[torch.fx.Node] | None = None

    def begin(self, mode: FakeMode) -> None:
        """The step is to be run on tensors of this mode."""
        self._mode = weakref.ref(mode)

    def traced(self, module: torch.fx.GraphModule) -> None:
        """The step has been run, which gave this."""
        self._module, self._dependent = module, None
        self._inputs = list(module.graph.find_nodes(op="placeholder"))

    def dependent(self) -> set[torch.fx.Node]:
        """The nodes of the trace that are not made of constants and shapes only."""
        if self._dependent is None and self._module is not None:
            self._dependent = depending(self._module.graph, self._inputs)
        return self._dependent or set()

    def maker(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """The node of the trace that made a tensor."""
        return None if self._module is None else maker_in(self._module, tensor)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """True if a tensor of the trace is made of constants and shapes only."""
        node = self.maker(tensor)
        return node is not None and node not in self.dependent()

    def drop(self) -> None:
        """Let go what a run that counts for nothing has given, and take out what it has left."""
        self._module = self._dependent = None
        self._inputs = []
        self._take_out()

    def read(self, module: torch.fx.GraphModule, places: Mapping[int, str]) -> bool:
        """Check whether the step, run on the leftovers of an earlier run, has read some of them.

        Args:
            module: of the later run.
            places: of tensors, by id.

        Raises:
            CaptureError: when it has read a tensor that depends on the batch, on variables or on random numbers.
        """
        nodes = [node for node in module.graph.find_nodes(op="get_attr") if node.users]
        kept = [each for each in (getattr(module, node.target) for node in nodes) if is_fake(each)]
        for tensor in kept:
            if not self.is_constant(tensor):
                found = [] if id(tensor) in places else _places([tensor])
                named = found[0].name() if found else "an object of yours"
                place = places.get(id(tensor), named)
                raise CaptureError(
                    f"the step keeps in {place} a tensor that depends on the batch, on the model's tensors or "
                    "on random numbers, and the next step reads it: captured once, the step would always read the "
                    "same value. Register a buffer of its shape, and write it there"
                )
        return bool(kept)

    def numbers(self) -> None:
        """Check for numbers after the step has run, before anything is restored.

        Raises:
            CaptureError: naming where the step keeps a number, attributes of modules excepted.
        """
        alive = living_numbers()
        for place in _places(alive) if alive else ():
            if not isinstance(place.chain[-1], nn.Module) or place.contained:
                place.text = place.name()
                raise place.refused()

    def check(self, graph: torch.fx.Graph) -> None:
        """After the capture, when `graph` is no longer needed: remove tensors without data from the user's objects.

        Raises:
            CaptureError: naming where the step keeps a tensor or number that is not a cache of constants.
        """
        for each in (graph, *([self._module.graph] if self._module else [])):
            forget_values(each)
        found = [each for each in self._take_out() if not each.cache]
        if found:
            raise found[0].refused()

    def _take_out(self) -> list[LeakedTensor]:
        if self._mode() is not None:
            # torch's calls leave cycles, and capture runs without collections: all of them are young
            gc.collect(1)
        mode = self._mode()
        alive = living_fakes(mode) if mode is not None else []
        if not alive:
            return []
        places = _places(alive)
        for place in places:
            place.empty(self.is_constant)
        return places


@contextmanager
def no_leaks() -> Iterator[FakeTensorLeaks]:
    """Nothing is left: where the block raises, nothing of the capture stays in the user's objects."""
    left, before = FakeTensorLeaks(), sys.exc_info()[1]
    try:
        yield left
    except BaseException as error:
        _clear_frames(error, before)
        left.drop()
        raise


def _clear_frames(error: BaseException, before: BaseException | None) -> None:
    """Clear the variables in the frames of torch and weft that an error, or its causes, passed.

    They hold most of what the capture has made, which would be looked for in all that is alive. The frames of the
    user's code stay as they are, for debuggers, as do those of an error that was there `before` the capture.
    """
    waiting: list[BaseException | None] = [error]
    seen = {id(None), id(before)}
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        for frame, _ in traceback.walk_tb(each.__traceback__):
            if in_library(frame.f_code.co_filename):
                with suppress(RuntimeError):  # it runs still
                    frame.clear()


@final
@dataclass(eq=False)
class LeakedTensor:
    """A place in which a tensor is kept.

    Attributes:
        tensor: the one without data.
        chain: what holds it, from inside out: containers, at last their owner.
        cache: whether taking it out again is enough.
        text: the name of the place.
    """

    tensor: Any
    chain: tuple[Any, ...]
    cache: bool = False
    text: str = ""

    @property
    def number(self) -> bool:
        """True if it is kept as a number of Python."""
        return any(type(each) is UnbackedNumber for each in (self.tensor, *self.chain))

    @property
    def contained(self) -> bool:
        """True if it is in a container, and is not an attribute itself."""
        return any(
            isinstance(each, _CONTAINERS) and each is not vars(self.chain[-1])
            for each in self.chain
        )

    def empty(self, constant: Callable[[Any], bool]) -> None:
        """Take the tensor out."""
        self.text = self.name()
        inner, owner = self.tensor, self.chain[-1]
        of_class = isinstance(owner, type)
        for holder in self.chain:
            if type(holder) is _lru_cache_wrapper:
                holder.cache_clear()
            elif of_class and holder is self.chain[-2:][0]:
                _remove_from_holder(owner, inner)  # the dict of a class is not to be written
            elif not _remove_from_holder(holder, inner):
                inner = holder
                continue
            # In the attributes of an owner something else may have been before.
            space = self.chain[-2:][0] if of_class else getattr(owner, "__dict__", None)
            lasting = isinstance(holder, dict | _lru_cache_wrapper) and holder is not space
            self.cache = lasting and not self.number and constant(self.tensor)
            break

    def refused(self) -> CaptureError:
        """Names the place."""
        what = "a number" if self.number else "a tensor"
        return CaptureError(
            f"the step keeps {what} in {self.text}, which later steps or your own code would read: captured once, "
            "the step runs without Python and writes nothing there. Return it as a metric, or make it outside of the "
            "step"
        )

    def name(self) -> str:
        """The owner's name, with the attribute or variable that refers to the tensor."""
        owner = self.chain[-1]
        if isinstance(owner, _lru_cache_wrapper):
            return f"the cache of {_called(owner)}"
        below = (self.tensor, *self.chain[:-1])
        if isinstance(owner, types.FunctionType):
            cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
            for name, cell in cells:
                if any(cell is each for each in below):
                    return f"{name} in the closure of {owner.__qualname__}"
            if any(each is owner.__defaults__ for each in below):
                return f"a default argument of {owner.__qualname__}"
        space = attributes_of(owner)
        named = [name for name, value in space.items() if any(value is each for each in below)]
        title = _called(owner)
        return f"{title}.{named[0]}" if named else title


def _called(owner: Any) -> str:
    plain = isinstance(owner, types.FunctionType | type | _lru_cache_wrapper)
    if plain:
        return str(getattr(owner, "__qualname__", owner))
    return owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__


def _remove_from_holder(holder: Any, inner: Any) -> bool:
    """Take `inner` out of what holds it, where that can be changed."""
    if isinstance(holder, dict):
        for key in [key for key, value in holder.items() if value is inner]:
            del holder[key]
    elif isinstance(holder, list | deque):
        kept = [each for each in holder if each is not inner]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.discard(inner)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = None
    elif isinstance(holder, tuple | frozenset) or type(holder) is UnbackedNumber:
        return False
    else:
        names = [name for name, value in attributes_of(holder).items() if value is inner]
        for name in names:
            # By the way of plain objects.
            plain = not isinstance(holder, nn.Module | types.FunctionType | type)
            (object.__delattr__ if plain else delattr)(holder, name)
        return bool(names)
    return True


def _places(tensors: list[Any]) -> list[LeakedTensor]:
    """The places in the user's objects that hold tensors: one for each tensor and owner."""
    gc.unfreeze()  # or what the user has frozen would not be found
    found: list[LeakedTensor] = []
    level: dict[int, tuple[Any, Any, tuple[Any, ...]]] = {
        id(each): (each, each, ()) for each in tensors
    }
    mine = {id(tensors), id(level), id(found)}
    seen = set(level)
    for _ in range(_DEPTH):
        if not level:
            break
        objects = [each for each, _, _ in level.values()]
        mine |= {id(objects), id(level)}
        mine |= {id(own) for entry in level.values() for own in (entry, entry[2])}
        following: dict[int, tuple[Any, Any, tuple[Any, ...]]] = {}
        for holder in gc.get_referrers(*objects):
            if id(holder) in mine or isinstance(holder, types.FrameType | torch.Tensor):
                continue
            others = getattr(holder, "__globals__", None) if callable(holder) else None
            for part in gc.get_referents(holder):
                if id(part) not in level or part is others:
                    continue
                _, tensor, below = level[id(part)]
                goes_on = isinstance(holder, (*_CONTAINERS, types.CellType))
                if goes_on or type(holder) is UnbackedNumber:
                    if id(holder) not in seen:
                        seen.add(id(holder))
                        following[id(holder)] = holder, tensor, (*below, holder)
                elif _is_users(holder):
                    found.append(LeakedTensor(tensor, (*below, holder)))
        level = following if len(following) < _MANY else {}
    return found


def _is_users(owner: Any) -> bool:
    """True if an object is none of torch's and weft's own."""
    if isinstance(owner, nn.Module):
        return not isinstance(owner, torch.fx.GraphModule) and type(owner) is not nn.Module
    of = owner.func if isinstance(owner, partial) else owner
    named = (_lru_cache_wrapper, types.ModuleType, types.FunctionType, type, partial)
    of = of if isinstance(owner, named) else type(owner)
    name = getattr(of, "__module__", None) or getattr(of, "__name__", "")
    return str(name).partition(".")[0] not in _LIBRARIES
