"""Tensors that a step keeps in the model for later steps: those that never change may, others are refused."""

from __future__ import annotations

import copy
import gc
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch.fx.graph import CodeGen

from weft.capture.fx.private import is_fake, root_of, written_in
from weft.capture.python.reachable import is_user_code, plain_function
from weft.capture.python.symbolic import is_symbolic
from weft.capture.python.unbacked import is_unbacked
from weft.capture.python_guards import MISSING, BitwiseEqual, Guard, is_plain, question_guard
from weft.errors import CaptureError

# Ops that take no value from their operand, only its shape and dtype.
_KINDS = ("zeros", "ones", "full", "empty")
_OF_SHAPES = frozenset([f"new_{kind}" for kind in _KINDS] + [f"{kind}_like" for kind in _KINDS])
_DRAWS = "weft.uniform.default"


@final
@dataclass(frozen=True)
class Cache:
    """A tensor that a step keeps in an attribute, by the user's name of it.

    Attributes:
        now: the tensor.
        before: the tensor that was there and was read; None if there was none.
    """

    text: str
    now: torch.Tensor
    before: torch.Tensor | None


def take_caches(
    module: torch.fx.GraphModule, caches: Sequence[Cache], dependent: Collection[torch.fx.Node]
) -> None:
    """Remove the last outputs of a trace, which are tensors that the step keeps.

    A cache that is made of nothing but constants, such as positions, is the same in every step; the
    graph makes it each time.

    Args:
        module: whose output is a list; its last entries are caches.
        caches: in order.
        dependent: nodes that are made of more than constants (`depending`).

    Raises:
        CaptureError: naming a cache that depends on the batch, on variables or on random numbers, or takes the place
            of a tensor that the step computes with.
    """
    graph = module.graph
    constants = {
        id(getattr(module, node.target)) for node in graph.find_nodes(op="get_attr") if node.users
    }
    output = next(iter(reversed(graph.nodes)))
    results = list(output.args[0])
    first = len(results) - len(caches)
    for cache, node in zip(caches, results[first:], strict=True):
        if id(cache.before) in constants:
            raise CaptureError(
                f"the step computes with the tensor in {cache.text}, and replaces it for the next step: captured "
                "once, the step would always read the same tensor. Register a buffer, and write it in place"
            )
        if node in dependent:
            raise CaptureError(
                f"the step keeps in {cache.text} a tensor that depends on the batch, on the model's tensors or on "
                "random numbers, for the next step to read: captured once, the step would compute it again every time. "
                "Register a buffer of its shape, and write it there"
            )
    output.args = (results[:first],)
    graph.set_codegen(CodeGen())  # the other one checks how many results there are
    graph.eliminate_dead_code()


def depending(graph: torch.fx.Graph, inputs: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes whose values depend on some inputs of a graph or on random numbers, by way of writes in place, too."""
    found = set(inputs)
    written: set[torch.fx.Node] = set()
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        read = () if name in _OF_SHAPES else node.all_input_nodes
        again = bool(written) and any(root_of(each) in written for each in read)
        if again or not found.isdisjoint(read) or draws(node):
            found.add(node)
            written |= {root for root in written_in(node) if root not in found}
    if written:  # views that were made before that
        found |= {node for node in graph.nodes if root_of(node) in written}
    return found


def draws(node: torch.fx.Node) -> bool:
    """True if a node gives random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    seeded = torch.Tag.nondeterministic_seeded in node.target.tags
    return seeded or str(node.target) == _DRAWS


# Of how many calls of a function the results are compared.
_MANY = 200
_Memo: TypeAlias = "_lru_cache_wrapper[Any]"
_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def kept_results(entries: Iterable[Guard]) -> list[Guard]:
    """The plain results that functions with an `lru_cache` among some values keep, by the calls that gave them.

    A step that calls such a function reads the kept result, and the values that the function itself reads only where
    there is none, as the user may clear the cache. So the call is repeated: it gives the value that the step would get.

    Args:
        entries: all places that a step reads, functions and methods included.
    """
    memos: dict[int, _Memo] = {}
    for entry in entries:
        value = entry.value
        while isinstance(value, partial):
            value = value.func
        if isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, _lru_cache_wrapper) and is_user_code(value):
            memos[id(value)] = value
    found = []
    for memo in memos.values():
        text = f"the result of {getattr(plain_function(memo), '__qualname__', memo)} in its cache"
        for arguments in islice(_calls_of(memo), _MANY):
            if not any(stands_in(each) for each in (*arguments[0], *arguments[1].values())):
                result = question_guard(None, partial(_plain_result, memo, arguments), text)
                if result.value.number is not MISSING:
                    found.append(result)
    return found


def _calls_of(memo: _Memo) -> Iterator[_Arguments]:
    """The arguments of the calls whose results a cache keeps.

    The key of a call is a lone `int` or `str` itself, else a tuple: arguments by place, then, where there are any, a
    mark and names with arguments, and, where calls are told apart by types, the types of all.
    """
    # The interpreter's own view of the content of a cache: nothing else tells its keys.
    held = gc.get_referents(memo)
    spaces = [each for each in held if type(each) is dict and each is not vars(memo)]
    mark = next((each for each in held if type(each) is object), MISSING)
    typed = memo.cache_parameters()["typed"]
    for key in list(spaces[0]) if spaces else []:
        if not isinstance(key, tuple):
            yield (key,), {}
            continue
        at = next((place for place, each in enumerate(key) if each is mark), None)
        if at is None:
            yield key[: len(key) // 2 if typed else None], {}
            continue
        named = len(key) - at - 1
        pairs = key[at + 1 : at + 1 + 2 * ((named - at) // 3 if typed else named // 2)]
        yield key[:at], dict(zip(pairs[::2], pairs[1::2], strict=True))


def _plain_result(function: Callable[..., Any], arguments: _Arguments) -> BitwiseEqual:
    """The plain result of a call now, as the step would have it; `MISSING` where it cannot be had."""
    try:
        value = function(*arguments[0], **arguments[1])
    except Exception:  # of the user's function: the step, planned again, says what is wrong
        value = MISSING
    return BitwiseEqual(copy.deepcopy(value) if is_plain(value) else MISSING)


def stands_in(value: Any) -> bool:
    """True if a value is a tensor without data, or stands for a number."""
    return is_fake(value) or is_unbacked(value) or is_symbolic(value)
