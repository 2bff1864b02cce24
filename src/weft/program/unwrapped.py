"""The user's model inside of wrappers that weft takes the place of."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from weft.errors import UserError


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel`, `DataParallel` or `torch.compile` wraps; others as they are.

    Raises:
        UserError: when `fully_shard` or another library has made the model's parameters DTensors.
    """
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"weft.compile takes a plain module, found {name} as a DTensor, as fully_shard and parallelize_module "
                "make them: compile the module as it was before; weft lays its parameters out itself"
            )
    return model
