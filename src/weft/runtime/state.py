"""The variables of a rank: parameters, buffers, optimizer states and constants as plain local tensors."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from weft.errors import InternalError


class Variables(Mapping[str, Tensor]):
    """One rank's shards by the name that users know; shared by the executors of that rank.

    A tensor stays the same object for good, because kernels and optimizers hold on to it: new
    values are written into it. The states of parameter `p` have the names `p.exp_avg`, `p.step`, ….

    Attributes:
        kept: by parameter, what the optimizer keeps for it, as its own dict; numbers of Python
            among them.
        gradients: by parameter, the sum of the gradients of steps whose update is still to come.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.gradients: dict[str, Tensor] = {}
        self._tensors: MutableMapping[str, Tensor] = dict(tensors or {})
        # What lies below each name, such as the states of a parameter.
        self._below: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in self._tensors.items():
            self._note(key, tensor)

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
        """Put a new variable.

        Raises:
            InternalError: when the key is taken by another tensor.
        """
        if self._tensors.setdefault(key, tensor) is not tensor:
            raise InternalError(f"the variable {key} exists already")
        self._note(key, tensor)

    def write(self, key: str, value: Tensor) -> None:
        """Give a variable a new value, in place."""
        self._tensors[key].detach().copy_(value)

    def states(self, parameter: str) -> dict[str, Tensor]:
        """The optimizer's tensors for a parameter, by their names in the optimizer."""
        return dict(self._below.get(parameter, {}))

    def _note(self, key: str, tensor: Tensor) -> None:
        owner, _, name = key.rpartition(".")
        self._below[owner][name] = tensor
