"""Segments as generated Python functions over ATen overloads.

The source is kept: `linecache` knows it, so that a traceback shows the failing call. Intermediate
values are deleted after their last use. Segments with the same source, such as those of repeated
layers, share one code object.

A segment that acts for each micro-batch takes its number, `micro`: arguments that vary are tuples
indexed with it, and ops over a step keep their running result between the acts.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from traceback import walk_tb
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import UserError, WeftError
from weft.ir.alias import overwritten, view_bases
from weft.ir.logical import OVER_STEP, Arg, PerMicroBatch, Ref
from weft.ir.plan import LocalCall
from weft.ops import shares_memory
from weft.ops.call import OpCall, Operand, TensorSpec, Token
from weft.ops.cost import dtype_name
from weft.ops.weft_ops import WEFT_OPS
from weft.runtime.kernels.dense_operands import CONVOLUTION_OPS, dense_op
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.runtime.kernels.loss_ops import OVER_OPS
from weft.runtime.kernels.own_ops import OVER_STEP_OPS
from weft.runtime.torch_ops import torch_op, torch_value

UNIFORM = "weft.uniform"
# The names of files of segments begin with it.
_SEGMENT = "<weft segment "


@final
@dataclass(frozen=True)
class Kernel:
    """A compiled run of local calls.

    Attributes:
        inputs: names of the values that it takes, in the order of `function`'s arguments after
            `draw` (`draw(size, offset, length, salt, dtype=, device=)` draws `weft.uniform` for the
            step that runs).
        outputs: names of the values that it returns.
        function: `function(draw, *inputs) -> tuple of outputs`, or `function(draw, micro, *inputs)`
            when it is `looped`. Results of ops over a step are complete in the last micro-batch.
        draws: true if it calls `draw`.
        looped: true if it does not do the same in each micro-batch.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    function: Callable[..., tuple[Tensor, ...]]
    draws: bool
    looped: bool = False


@final
@dataclass(frozen=True)
class CutCalls:
    """The code that is in place of local calls where some of them are compiled together.

    Attributes:
        nodes: calls, and parts: calls of one of `functions` on the tuple of a part's inputs.
        functions: by the name of the op. A function takes its inputs as a list, which it empties.
    """

    nodes: tuple[LocalCall, ...]
    functions: Mapping[str, Callable[[list[Tensor]], Sequence[Tensor]]]


def build_kernel(
    calls: Sequence[LocalCall],
    outputs: Sequence[str],
    device: torch.device,
    copied: Collection[str] = (),
    micro_batches: int = 1,
    *,
    drains: bool = False,
    cut: CutCalls | None = None,
) -> Kernel:
    """Compile local calls into one function.

    Args:
        calls: in an order in which they may run.
        outputs: names of the values to return; calls' results or values from outside.
        copied: outputs to return as copies.
        drains: true if the function takes its inputs as one list and empties it, so that what
            nobody else holds is freed after its last use.
    """
    inputs = _inputs(calls, outputs)
    names = {name: f"a{index}" for index, name in enumerate(inputs)}
    looped = micro_batches > 1 and any(map(differs, calls))
    body = _Body(calls, outputs, device, micro_batches, cut or CutCalls(tuple(calls), {}))
    lines = body.lines(names)
    returned = [f"{names[name]}.clone()" if name in copied else names[name] for name in outputs]
    first = ["draw", "micro"] if looped else ["draw"]
    taken = [names[name] for name in inputs]
    if drains:
        lines = [f"    [{', '.join(taken)}] = inputs", "    inputs.clear()", *lines]
    arguments = ", ".join([*first, *(["inputs"] if drains else taken)])
    result = f"    return ({''.join(f'{text}, ' for text in returned)})"
    source = "\n".join([f"def segment({arguments}):", *lines, result, ""])
    namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan, **body.bound}
    exec(_compile(source), namespace)
    draws = any(call.op == UNIFORM for call in calls)
    return Kernel(inputs, tuple(outputs), source, namespace["segment"], draws, looped)


@lru_cache(maxsize=4096)
def _compile(source: str) -> CodeType:
    name = f"{_SEGMENT}{hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Without a modification time, linecache keeps the lines for good.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")


def failed_op(error: BaseException, calls: Iterable[LocalCall]) -> str:
    """The op of a segment that raised, one of those of its calls, by the traceback; "" if none of them did."""
    lines = [
        linecache.getline(frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(_SEGMENT)
    ]
    names = re.findall(r"\w+(?=\()", lines[-1]) if lines else []
    return next((call.op for call in calls if names and _global_name(call.op) == names[0]), "")


def _inputs(calls: Sequence[LocalCall], outputs: Sequence[str]) -> tuple[str, ...]:
    made: set[str] = set()
    found: dict[str, None] = {}
    for call in calls:
        found.update(dict.fromkeys(name for name in call.uses if name not in made))
        made.update(value.name for value in call.outputs if value is not None)
    found.update(dict.fromkeys(name for name in outputs if name not in made))
    return tuple(found)


def differs(call: LocalCall) -> bool:
    """True if a call does not do the same in each micro-batch."""
    return call.op in OVER_STEP or bool(call.varyings)


@final
class _Body:
    def __init__(
        self,
        calls: Sequence[LocalCall],
        outputs: Sequence[str],
        device: torch.device,
        micro_batches: int,
        cut: CutCalls,
    ) -> None:
        self.bound: dict[str, Any] = {}
        self._calls = calls
        self._nodes = cut.nodes
        self._functions = cut.functions
        self._outputs = outputs
        self._device = device
        self._micro_batches = micro_batches
        # The local names of the values so far.
        self._names: dict[str, str] = {}

    def lines(self, names: dict[str, str]) -> list[str]:
        """The lines; adds the local names of values to `names`, which holds those of inputs."""
        self._names = names
        last = {name: index for index, call in enumerate(self._nodes) for name in call.uses}
        lines = []
        over = self._overwriting()
        for index, call in enumerate(self._nodes):
            made = [value.name for value in call.outputs if value is not None]
            dead = [name for name in dict.fromkeys(call.uses) if last[name] == index]
            gone = [names[name] for name in dead if name not in self._outputs]
            if call.op in self._functions:
                # The inputs go into a list, which alone holds those that nobody reads later.
                inputs = ", ".join(names[name] for name in call.uses)
                before = [f"    inputs = [{inputs}]", *_deletion(gone)]
                text, gone = f"{self._bind('part', self._functions[call.op])}(inputs)", []
            else:
                text, before = self._call(call, not over.isdisjoint(made)), []
            for name in made:
                names[name] = f"v{len(names)}"
            gone += [names[name] for name in made if name not in last and name not in self._outputs]
            lines += [*before, f"    {self._targets(call)}{text}", *_deletion(gone)]
        return lines

    def _overwriting(self) -> set[str]:
        """The results that are written over operands: not over those that a part has made, which may give one twice."""
        places = overwritten(self._calls, self._outputs)
        bases, parts = view_bases(self._calls), [x for x in self._nodes if x.op in self._functions]
        of_parts = {value.name for part in parts for value in part.makes}
        return {
            self._calls[place].makes[0].name
            for place, operand in places.items()
            if bases.get(operand, operand) not in of_parts
        }

    def _targets(self, call: LocalCall) -> str:
        """The left side of a call: `v3 = `, `v3, _ = `, `(v3,) = ` for a list of one, or nothing."""
        targets = ["_" if value is None else self._names[value.name] for value in call.outputs]
        if not targets:
            return ""
        if len(targets) > 1 or call.op in self._functions or _returns_list(call.op):
            return f"({', '.join(targets)},) = "
        return f"{targets[0]} = "

    def _call(self, call: LocalCall, over: bool) -> str:
        """The text of a call, which may write its result `over` an operand."""
        arguments = [self._text(arg) for arg in call.args]
        arguments += [f"{key}={self._text(arg)}" for key, arg in call.kwargs]
        if call.op in OVER_STEP_OPS and self._micro_batches > 1:
            work = OVER_STEP_OPS[call.op](self._micro_batches, self._is_owned(call.args[0]))
            return f"{self._bind('over', work)}(micro, {', '.join(arguments)})"
        if over:
            name = re.sub(r"\W", "_", f"{call.op}_over")
            self.bound[name] = OVER_OPS[call.op]
            return f"{name}({', '.join(arguments)})"
        name = "draw" if call.op == UNIFORM else _global_name(call.op)
        if call.op != UNIFORM:
            self.bound[name] = local_function(call.op)
        return f"{name}({', '.join(arguments)})"

    def _text(self, arg: Arg) -> str:
        match arg:
            case Ref(name=name):
                return self._names[name]
            case Token():
                return _bind_token(arg, self.bound, self._device)
            case PerMicroBatch(values=values):
                return f"{self._bind('vary', tuple(map(self._constant, values)))}[micro]"
            case tuple():
                return f"[{', '.join(map(self._text, arg))}]"
            case _:
                return repr(arg)

    def _constant(self, arg: Any) -> Any:
        match arg:
            case Token():
                return self.bound[_bind_token(arg, self.bound, self._device)]
            case tuple():
                return [self._constant(part) for part in arg]
            case _:
                return arg

    def _bind(self, prefix: str, value: Any) -> str:
        name = f"{prefix}{sum(name.startswith(prefix) for name in self.bound)}"
        self.bound[name] = value
        return name

    def _is_owned(self, arg: Arg) -> bool:
        """True if a call of this segment made the value afresh for one reader."""
        name = arg.name if isinstance(arg, Ref) else ""
        alone = self._reads[name] == 1 and name not in self._outputs
        return alone and name in self._makers and not may_alias(self._makers[name])

    @cached_property
    def _reads(self) -> Counter[str]:
        return Counter(name for call in self._calls for name in call.uses)

    @cached_property
    def _makers(self) -> dict[str, str]:
        return {value.name: call.op for call in self._calls for value in call.makes}


def _bind_token(token: Token, bound: dict[str, Any], device: torch.device) -> str:
    name = re.sub(r"\W", "_", f"{token.kind}_{token.name}")
    if name not in bound:
        value = torch_value(token)
        here = token.kind == "device" and value.type == device.type
        bound[name] = device if here else value
    return name


def _global_name(op: str) -> str:
    return re.sub(r"\W", "_", op)


def local_function(op: str) -> Callable[..., Any]:
    """The function that runs an op on local tensors."""
    own = LOCAL_OPS.get(op) or CONVOLUTION_OPS.get(op)
    return own or dense_op(op)


def _deletion(names: Sequence[str]) -> list[str]:
    return [f"    del {', '.join(names)}"] if names else []


def is_local(op: str) -> bool:
    """True if weft runs an op itself: torch has none of that name."""
    return op in WEFT_OPS or op in LOCAL_OPS


def _returns_list(op: str) -> bool:
    if is_local(op):
        return False
    returns: Sequence[Any] = torch_op(op)._schema.returns
    return len(returns) == 1 and "List" in str(returns[0].type)


def may_alias(op: str) -> bool:
    """True if a result of the op may share memory with an operand."""
    if shares_memory(op) or is_local(op):
        return shares_memory(op)
    return any(result.alias_info is not None for result in torch_op(op)._schema.returns)


# Elements of an example.
_MOST = 1 << 26


def call_like(op: str, arguments: Sequence[Any]) -> OpCall:
    """A call of `op`, with the results that it gives on zeros in place of each `TensorSpec`.

    Raises:
        UserError: when torch has no such op, or it does not take these arguments.
    """
    specs = [one for one in arguments if isinstance(one, TensorSpec)]
    _check_sizes(specs)
    numbers = iter(range(len(specs)))
    try:
        given = iter([torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in specs])
        values = [next(given) if isinstance(one, TensorSpec) else one for one in arguments]
        found = local_function(op)(*values)
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError, WeftError) as error:
        # torch's errors may continue for pages of frames.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{op} does not run on these arguments: {why}; give those of a call that torch runs"
        ) from None
    results = found if isinstance(found, (tuple, list)) else (found,)
    args = tuple(
        Operand(next(numbers)) if isinstance(one, TensorSpec) else one for one in arguments
    )
    return OpCall(op, args, (), tuple(specs), tuple(map(_spec, results)))


def _check_sizes(specs: Sequence[TensorSpec]) -> None:
    """Refuse shapes that would fill the memory: what is legal shows on small ones too."""
    for spec in specs:
        if all(isinstance(size, int) for size in spec.shape) and prod(spec.shape) > _MOST:
            raise UserError(
                f"{spec.dtype}{list(spec.shape)} has more than {_MOST} elements; the call is made, so give smaller "
                "shapes that divide as these do"
            )


def _spec(result: Any) -> TensorSpec | None:
    if not isinstance(result, torch.Tensor):
        return None
    return TensorSpec(tuple(result.shape), dtype_name(result.dtype))
