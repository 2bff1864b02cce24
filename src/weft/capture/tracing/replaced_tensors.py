"""The user's model with stand-ins in place of its tensors, for the time of a trace; afterwards all is as it was."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.capture.fx.checks import views_of
from weft.capture.fx.private import Refusal, is_fake
from weft.capture.python.reachable import user_attributes
from weft.errors import CaptureError
from weft.ir.logical import Input, LogicalGraph, Update

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OTHER_DATA = (
    "assigns tensor.data of a tensor outside the model, which the graph would not see; compute "
    "a new tensor, or write it in place: with torch.no_grad(): tensor.copy_(value)"
)
_KEEP = "keep shape and dtype, or call the model once before compiling, where its first call alone makes the buffer"


@final
@dataclass(frozen=True)
class ReplacedTensor:
    """A place of the model: the module, its path, the name in it, and the stand-in there."""

    module: nn.Module
    path: str
    name: str
    stand_in: torch.Tensor

    @property
    def full_name(self) -> str:
        """The name in the model's `state_dict`."""
        return f"{self.path}.{self.name}" if self.path else self.name


@contextmanager
def tensors_replaced(
    model: nn.Module, stand_ins: Mapping[int, torch.Tensor]
) -> Iterator[tuple[ReplacedTensor, ...]]:
    """Within the context, stand-ins are in place of the tensors of `model`, under all their names.

    Where the user's code holds a tensor of the model by itself, torch computes with its stand-in too. Afterwards the
    model's own tensors are there again. All else that a step changes is put back by `mutations_undone`;
    use this inside of that block.

    Args:
        model: of which every parameter and buffer has a stand-in.
        stand_ins: by the id of what they stand for.

    Yields:
        The places where they are.
    """
    places, replaced = [], []
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            # Else None, or a buffer that an earlier run of the step has filled.
            held = {name: tensor for name, tensor in own.items() if id(tensor) in stand_ins}
            places += [
                ReplacedTensor(module, path, name, stand_ins[id(x)]) for name, x in held.items()
            ]
            own.update({name: stand_ins[id(tensor)] for name, tensor in held.items()})
            replaced.append((own, held))
    try:
        with _Replacing(stand_ins):
            yield tuple(places)
    finally:
        for own, held in replaced:
            own.update(held)


@contextmanager
def attributes_carried(
    tensors: Mapping[str, torch.Tensor], stand_ins: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Give stand-ins the attributes of the user's, and let them count as parameters.

    Args:
        tensors: of the model, by name.
        stand_ins: by the id of what they stand for.

    Raises:
        CaptureError: naming an attribute that the step sets.
    """
    given = []
    for name, tensor in tensors.items():
        stand_in, own = stand_ins[id(tensor)], user_attributes(tensor)
        vars(stand_in).update(own)
        if isinstance(tensor, nn.Parameter):
            stand_in._is_param = True
        given.append((name, stand_in, own, set(vars(stand_in))))
    yield
    for name, stand_in, own, before in given:
        for key, value in user_attributes(stand_in).items():
            if (key in own and own[key] is not value) or key not in before:
                raise CaptureError(
                    f"the step sets the attribute {key} of {name}: captured once, the step would no longer do so. "
                    "Keep it in a tensor (register_buffer, and write it in place), or set it outside of the step"
                )


def write_replaced(
    places: Sequence[ReplacedTensor], results: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copy the values that the step assigned to buffers into the original stand-ins.

    Call it after the backward, which reads what the buffers were before.

    Args:
        places: of the model.
        results: of the step.

    Returns:
        The results; copies of results that show the old value of a written buffer.

    Raises:
        CaptureError: naming what was replaced, when it is a parameter, has several names, or is
            replaced by another shape or dtype.
    """
    names = Counter(id(place.stand_in) for place in places)
    found = [(place, getattr(place.module, place.name, None)) for place in places]
    replaced: list[tuple[torch.Tensor, Any]] = []
    for place, now in found:
        if now is not place.stand_in:
            _check_replacing(place, now, names[id(place.stand_in)])
            replaced.append((place.stand_in, now))
    with torch.no_grad():
        # Buffers may take each other's place, and results may be what stood there.
        values = _copied_where_written(
            [now for _, now in replaced], [before for before, _ in replaced]
        )
        kept = _copied_where_written(results, [before for before, _ in replaced])
        for (before, _), value in zip(replaced, values, strict=True):
            before.copy_(value)
    return kept


def check_memory_kept(
    stand_ins: Mapping[str, torch.Tensor],
    memory: Sequence[tuple[object, str]],
    casts: Mapping[str, int],
) -> None:
    """Check that a trace has not given stand-ins another memory or shape, nor written to casts of them.

    Args:
        stand_ins: by the names of what they stand for.
        memory: of each, before the trace (see `memory_of`), and its kind.
        casts: versions of those that are casts, before the trace, by name.

    Raises:
        CaptureError: naming the tensor.
    """
    for (name, stand_in), (before, kind) in zip(stand_ins.items(), memory, strict=True):
        if kind_of(stand_in) != kind:
            raise CaptureError(
                f"the step gives {name} another shape (resize_, out=, or a shape changed in place): it was {kind} and "
                f"is {kind_of(stand_in)}; {_KEEP}"
            )
        if memory_of(stand_in) is not before:
            raise CaptureError(
                f"the step gives {name} other memory (tensor.set_, or tensor.data in a backward); write into it, under "
                "torch.no_grad()"
            )
        if stand_in._version != casts.get(name, stand_in._version):
            raise CaptureError(
                f"the step writes {name} in place, which the strategy's precision casts before it is read: the "
                'parameter would stay as it is. Write it between steps, or let autocast cast (precision="bf16")'
            )


def memory_of(tensor: torch.Tensor) -> object:
    """The memory of a tensor; while it is held, it is the same object for all that are there."""
    return tensor.untyped_storage()


def _check_replacing(place: ReplacedTensor, now: Any, names: int) -> None:
    """Check that `now` may be in the place of a buffer that has so many names."""
    reason = ""
    if place.name in place.module._parameters or isinstance(now, nn.Parameter):
        reason = "it is a parameter; write its new values into it, under torch.no_grad()"
    elif names > 1:
        reason = "it has several names; write the new values into it with copy_"
    elif not isinstance(now, torch.Tensor) or kind_of(now) != kind_of(place.stand_in):
        found = kind_of(now) if isinstance(now, torch.Tensor) else repr(now)
        reason = f"it was {kind_of(place.stand_in)} and is {found}; {_KEEP}"
    if reason:
        raise CaptureError(f"the step replaces {place.full_name}: {reason}")


def _copied_where_written(
    tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    memory = list(map(memory_of, written))  # held, so that each keeps its identity
    own = set(map(id, memory))
    return [x.clone() if own and id(memory_of(x)) in own else x for x in tensors]


def kind_of(tensor: torch.Tensor) -> str:
    """The dtype and the shape of a tensor, in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@final
class _Replacing(TorchFunctionMode):
    """Calls of torch's functions with tensors of the model are made with their stand-ins.

    A tensor assigned to `tensor.data` is copied into the stand-in: no graph knows that a tensor has other memory.
    """

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._own = set(map(id, stand_ins.values()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        args = [self._replaced(value) for value in args]
        if func == _SET_DATA:
            return self._put(*args)
        return func(*args, **kwargs)

    def _put(self, tensor: torch.Tensor, value: Any) -> None:
        """Do what `tensor.data = value` does, for those who read the tensor afterwards."""
        if id(tensor) not in self._own:
            if is_fake(tensor) or is_fake(value):
                raise Refusal(_OTHER_DATA)
            _SET_DATA(tensor, value)
            return
        if not isinstance(value, torch.Tensor) or kind_of(value) != kind_of(tensor):
            found = kind_of(value) if isinstance(value, torch.Tensor) else repr(value)
            raise Refusal(
                f"assigns tensor.data of a tensor of the model: it was {kind_of(tensor)} and is "
                f"{found}; {_KEEP}"
            )
        if memory_of(value) is memory_of(tensor):
            value = value.clone()
        with torch.no_grad():  # where the backward needs what it was, autograd says so
            tensor.copy_(value)

    def _replaced(self, value: Any) -> Any:
        if type(value) is list or type(value) is tuple:
            return type(value)(self._replaced(part) for part in value)
        found = self._stand_ins.get(id(value), value)
        if hasattr(type(found), "sbp"):  # a global tensor, which a package above defines
            raise TypeError(
                f"the step computes with a live tensor {list(found.shape)} of another compiled model, or with another "
                "global tensor. Expected tensors of the model and the batch: give both models as one, "
                'nn.ModuleDict({"model": …, "other": …}), and each program its optimizer'
            )
        return found


# Tensors that share one memory.
_OUTSIDE = "a tensor from outside that the step reads"


def check_memory(
    variables: Mapping[str, torch.Tensor], constants: Iterable[torch.Tensor], graph: LogicalGraph
) -> None:
    """Check that the step writes no memory that belongs to two tensors, such as a weight and a transposed view.

    Layouts are those of tensors, and parts are on ranks: what is written to one could not be seen in the other.

    Args:
        variables: parameters and buffers by name.
        constants: tensors that are none of the model's.
        graph: of the step; says what it writes.

    Raises:
        CaptureError: naming both tensors.
    """
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    written = {keys[update.target.name] for update in graph.of_kind(Update)}
    every: defaultdict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in (*variables.items(), *((_OUTSIDE, each) for each in constants)):
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        if plain and not tensor.is_meta and tensor.layout is torch.strided:
            every[tensor.untyped_storage().data_ptr()].append((name, tensor))
    pairs = (pair for members in every.values() for pair in combinations(members, 2))
    for (one, x), (other, y) in pairs:
        views = views_of([x, y]) if one != other and not written.isdisjoint((one, other)) else []
        if len(views) == 2 and views[0].overlaps(views[1]):
            raise CaptureError(
                f"{one} and {other} are in the same memory, and are different tensors. The step writes to it, and each "
                "tensor has a layout of its own, so that a write to one tensor would not change the other; expected "
                "separate memory (tensor.clone()), or one tensor under both names, of which views, such as a "
                "transposed one, are taken where they are used"
            )
