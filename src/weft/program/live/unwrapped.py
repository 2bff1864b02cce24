"""The user's model inside of wrappers that weft takes the place of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from weft.errors import UserError, shown

# By model, what of torch's wraps it.
_wrappers: WeakKeyDictionary[nn.Module, WeakSet[DistributedDataParallel]] = WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel`, `DataParallel` or `torch.compile` wraps; others as they are.

    Raises:
        UserError: when `fully_shard` or another library has made the model's parameters DTensors;
            when a lazy module was never called.
    """
    wrappers = []
    while True:
        if isinstance(model, DistributedDataParallel):
            wrappers.append(model)
            model = model.module
        elif isinstance(model, DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    _check_plain(model)
    if wrappers:
        _wrappers.setdefault(model, WeakSet()).update(wrappers)
    return model


def _check_plain(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"weft.compile takes a torch.nn.Module as the model, found {shown(model)}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"weft.compile takes a plain module, found {name} as a DTensor, as fully_shard and parallelize_module "
                "make them: compile the module as it was before; weft lays its parameters out itself"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet, as its lazy module was never called: call the model once, "
                "model(batch), before the optimizer is made and weft.compile called"
            )


@contextmanager
def retired(model: nn.Module) -> Iterator[None]:
    """Take out the reducers of a model's `DistributedDataParallel`, which hold its tensors.

    Calls of a wrapper then go straight to the model; when what is done inside raises, they raise:
    without its reducer a wrapper would not reduce gradients.

    Private API: the attributes `reducer` and `logger` of the wrapper.
    """
    wrappers = list(_wrappers.get(model, ()))
    for wrapper in wrappers:
        vars(wrapper).pop("reducer", None)
        wrapper.logger = None
        vars(wrapper)["forward"] = _refuse
    yield
    for wrapper in wrappers:
        vars(wrapper)["forward"] = wrapper.module.forward


def _refuse(*arguments: object, **named: object) -> None:
    raise UserError(
        "weft.compile had taken this DistributedDataParallel out when it refused the model; wrap the model anew: "
        "DistributedDataParallel(wrapper.module)"
    )
