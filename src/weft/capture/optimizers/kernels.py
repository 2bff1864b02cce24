"""The kernels that a rank's copy of an optimizer runs, and the memory that an update takes while it runs.

torch has three ways for most optimizers: a fused kernel, which takes nothing; ops on lists of tensors
("foreach"), which make further tensors for all parameters at once; a loop, which makes them for one
parameter after the other. On a CPU lists are no faster than the loop, so it is the loop there, also where
the user asks for lists: the numbers are the same.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from weft.capture.optimizers.given import attributes_for_copy, give_attributes, options_of

Kernels: TypeAlias = Literal["fused", "lists", "loop"]


def kernels_of(
    options: Mapping[str, Any], device_type: str, dtypes: Collection[torch.dtype]
) -> Kernels:
    """The kernels of a parameter group on a device.

    Args:
        options: the user's parameter group.
        device_type: of the parameters.
        dtypes: of what is updated.
    """
    if options.get("fused"):
        return "fused"
    fused, lists = options.get("fused"), options.get("foreach")
    differentiable = options.get("differentiable")
    open_choice = "fused" in options and fused is None and lists is not False
    if open_choice and not differentiable and _fusible(device_type, dtypes):
        return "fused"
    if device_type == "cpu" or "foreach" not in options:
        return "loop"
    return "lists" if lists or (lists is None and fused is None and not differentiable) else "loop"


def clones_gradients(optimizer: Optimizer, lists: bool) -> bool:
    """True where an optimizer needs gradients of its own, since it may overwrite them: ops on lists, foreign ones."""
    return lists or not is_of_torch(optimizer)


def is_of_torch(optimizer: Optimizer) -> bool:
    """True where torch brings the optimizer's class along."""
    return type(optimizer).__module__.startswith("torch.optim")


def _fusible(device_type: str, dtypes: Collection[torch.dtype]) -> bool:
    """True where torch's fused kernels do what its loops do.

    On CPUs they take 16-bit parameters, too, but round otherwise, and that of SGD leaves whole
    vectors of them as they are (seen with torch 2.13).
    """
    return device_type in _get_fused_kernels_supported_devices() and all(
        dtype.is_floating_point and (device_type != "cpu" or dtype.itemsize >= 4)
        for dtype in dtypes
    )


@final
class HeldBytes:
    """The bytes of the tensors that ops have made and that are alive.

    Attributes:
        now: bytes that are alive.
        most: the most that were alive at a time.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        # What tells of the end of each storage, by the id of its Python object, which lives as long.
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, made: Iterable[Any], given: Iterable[Any]) -> None:
        """Note the results of an op; those in the memory of what it was given are not new."""
        old = {id(x.untyped_storage()) for x in given if isinstance(x, torch.Tensor)}
        for x in made:
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in old or key in self._alive:
                continue
            self._alive[key] = weakref.ref(storage, partial(self._gone, key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.now -= size


def copy_for(
    optimizer: torch.optim.Optimizer,
    group: int,
    *probes: torch.nn.Parameter,
    put_on: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A copy of the optimizer that holds only `probes` and shares nothing that a step writes.

    `put_on` are attributes that the user has put on the parameter that they stand for.
    """
    return copy_in_groups(optimizer, group, put_on, probes)


def copy_in_groups(
    optimizer: torch.optim.Optimizer,
    group: int,
    put_on: Mapping[str, Any],
    *every: Sequence[torch.nn.Parameter],
) -> Any:
    """The same with several groups of parameters, each with the options of the one."""
    copy = object.__new__(type(optimizer))
    # Schedulers put their own `step` on the instance.
    copy.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    copy.__dict__.update(attributes_for_copy(optimizer, tensors=True))
    copy.param_groups = []
    for probes in every:
        for probe in probes:
            give_attributes(probe, put_on)
        options = options_of(optimizer.param_groups[group], tensors=True)
        options["params"] = list(probes)
        # Other implementations of the same update; they ask for devices that tensors without data
        # are not on.
        ways = ("fused", "foreach", "capturable")
        options.update({name: False for name in ways if name in options})
        copy.param_groups.append(options)
    copy.state = defaultdict(dict)
    return copy
