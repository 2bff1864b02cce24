"""The tensors of a rank at run time: variables as local ones, and those that pass between `step` and its actors."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from weft.errors import InternalError
from weft.layout import Layout, Region


@final
class Kept:
    """The state that an optimizer keeps on one rank: for each parameter its own dict of tensors and numbers.

    Attributes:
        known: the same as it was when it was kept: an optimizer may put other tensors into its dicts.
        version: another number as soon as an entry is replaced by another dict, or has other tensors.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.known: dict[str, dict[str, Any]] = {}
        self.version = 0


@final
class Variables(Mapping[str, Tensor]):
    """One rank's shards by the name that users know; shared by the executors of that rank.

    A tensor stays the same object for good, because kernels hold on to it: new values are written
    into it. Only what the optimizer keeps may be replaced. The states of parameter `p` have the
    names `p.exp_avg`, `p.step`, ….

    Attributes:
        parameters: by key, the user's parameters, whose attributes an optimizer of the user's may go by.
        gradients: by parameter, the sum of the gradients of steps whose update is still to come.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.kept = Kept()
        self.parameters: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._tensors: MutableMapping[str, Tensor] = dict(tensors or {})

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def with_constants(self, constants: Mapping[str, Tensor]) -> Variables:
        """The same variables, for a plan that reads some constants too; what is added to either is in both."""
        seen = Variables()
        seen.__dict__.update(self.__dict__)
        seen._tensors = ChainMap(self._tensors, dict(constants))
        return seen

    def add(self, key: str, tensor: Tensor) -> None:
        """Put a new variable."""
        if self._tensors.setdefault(key, tensor) is not tensor:
            raise InternalError(f"the variable {key} exists already")

    def keeps(self, parameter: str, entries: dict[str, Any]) -> bool:
        """True where this is what the optimizer keeps for a parameter, with the tensors that are known."""
        known = self.kept.known.get(parameter, {})
        return (
            self.kept.entries.get(parameter) is entries
            and known.keys() == entries.keys()
            and all(
                x is known[name]
                for name, x in entries.items()
                if isinstance(x, Tensor) or isinstance(known[name], Tensor)
            )
        )

    def keep(self, parameter: str, entries: dict[str, Any] | None) -> None:
        """Put what the optimizer keeps for a parameter in place of what it kept; None where it has not stepped yet."""
        self.kept.entries.pop(parameter, None)
        for name in self.kept.known.pop(parameter, {}):
            self._tensors.pop(f"{parameter}.{name}", None)
        if entries is not None:
            self.kept.entries[parameter], self.kept.known[parameter] = entries, dict(entries)
            tensors = {f"{parameter}.{n}": x for n, x in entries.items() if isinstance(x, Tensor)}
            self._tensors.update(tensors)
        self.kept.version += 1

    def write(self, key: str, value: Tensor) -> None:
        """Give a variable a new value, in place."""
        self._tensors[key].detach().copy_(value)


@final
@dataclass
class Batches:
    """The tensors that pass between `step` and the actors: a batch in, results out, by key.

    `held` says that the running step keeps its gradients for a later one and updates no parameter;
    `updated` says that it has updated parameters, or added gradients to those that are kept;
    `first` is how many steps other plans of the run have made before this one's step 0, for the random ops.
    """

    fed: Mapping[str, Tensor] = field(default_factory=dict)
    fetched: dict[str, Tensor] = field(default_factory=dict)
    held: bool = False
    updated: bool = False
    first: int = 0


def region_part(tensor: Tensor, region: Region) -> Tensor:
    """A region of a tensor, as a view; the tensor itself when it is all of it."""
    for dim, (offset, length) in enumerate(region):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def local_part(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a whole tensor that `rank` holds, as a view."""
    return region_part(tensor, layout.local_ranges(tuple(tensor.shape), rank))
