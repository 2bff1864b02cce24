"""Nested containers (pytrees) of what users pass in and get back, flattened to leaves with readable keys.

The only user of `torch.utils._pytree`; needs `tree_flatten_with_path`, `tree_unflatten` and the
three key classes.

Containers that they do not know, mappings of other classes (`BatchEncoding`) and dataclasses, are opened
before a tree is flattened, and built again when it is unflattened.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, final

from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten_with_path,
    tree_unflatten,
)

_DICTS = (dict, OrderedDict, defaultdict)


@final
@dataclass(frozen=True)
class Kind:
    """The class of an opened container, and the names of what it holds, in order."""

    cls: type
    names: tuple[Any, ...]

    def build(self, values: Any) -> Any:
        """A container of the class that holds these values."""
        held = dict(zip(self.names, values, strict=True))
        if issubclass(self.cls, Mapping):
            return self.cls(held)  # type: ignore[call-arg]
        made = object.__new__(self.cls)
        for name, value in held.items():
            object.__setattr__(made, name, value)
        return made


@final
class Opened:
    """A container as its kind and its values."""

    def __init__(self, kind: Kind, values: list[Any]) -> None:
        self.kind = kind
        self.values = values


class Shut:
    """A leaf in the place of a container, which `flatten` does not open."""

    def __init__(self, value: Any) -> None:
        self.value = value


def open_containers(tree: Any, shut: Callable[[Any], bool] | None = None) -> Any:
    """`tree` with every container that pytrees do not know opened, at any depth; others stay what they are.

    Where `shut` says so, what a container holds is one leaf.
    """

    def part(value: Any) -> Any:
        return Shut(value) if shut is not None and shut(value) else open_containers(value, shut)

    if issubclass(type(tree), Shut):
        return tree
    if isinstance(tree, _DICTS) and type(tree) in SUPPORTED_NODES:
        values = {name: part(value) for name, value in tree.items()}
        if isinstance(tree, defaultdict):
            return defaultdict(tree.default_factory, values)
        return type(tree)(values)
    if type(tree) in (list, tuple):
        return type(tree)(map(part, tree))
    if type(tree) in SUPPORTED_NODES:
        return tree
    if isinstance(tree, Mapping):
        names = tuple(tree)
        return Opened(Kind(type(tree), names), [part(tree[name]) for name in names])
    if is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in fields(tree))
        return Opened(Kind(type(tree), names), [part(getattr(tree, name)) for name in names])
    return tree


def _flattened_by_name(container: Any) -> tuple[list[tuple[Any, Any]], Kind]:
    pairs = zip(container.kind.names, container.values, strict=True)
    return [(MappingKey(name), value) for name, value in pairs], container.kind


register_pytree_node(
    Opened,
    lambda container: (container.values, container.kind),
    lambda values, kind: kind.build(values),
    flatten_with_keys_fn=_flattened_by_name,
)


Tree: TypeAlias = TreeSpec


@final
@dataclass(frozen=True, slots=True)
class Static:
    """A pytree leaf other than a tensor: a constant of the graph, or returned unchanged."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"the constant {self.value!r}"


def flatten(
    tree: Any, root: str, shut: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves of `tree` with their keys ("x", "a.b", "[0]", "[1].mask"; `root` for a bare leaf), and its shape.

    A part of it for which `shut` is true is one leaf.
    """
    paths, spec = tree_flatten_with_path(open_containers(tree, shut))
    leaves = (("".join(map(_part, path)).removeprefix(".") or root, leaf) for path, leaf in paths)
    return [(key, leaf.value if type(leaf) is Shut else leaf) for key, leaf in leaves], spec


def unflatten(leaves: list[Any], spec: Tree) -> Any:
    """Put leaves back in the containers that `flatten` took them from."""
    return tree_unflatten(leaves, spec)


def _part(entry: Any) -> str:
    match entry:
        case SequenceKey(idx=index):
            return f"[{index}]"
        case MappingKey(key=key):
            return f".{key}"
        case GetAttrKey(name=name):
            return f".{name}"
        case _:
            return f".{entry}"
