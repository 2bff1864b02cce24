"""Copies of an optimizer that hold other parameters, to run its step on these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from weft.capture.optimizers.given import attributes_for_copy, give_attributes, options_of


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
