"""Containers that torch's pytrees do not know: mappings of other classes (`BatchEncoding`), dataclasses.

They are opened before a tree is flattened, and built again when it is unflattened.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, MappingKey, register_pytree_node

_DICTS = (dict, OrderedDict, defaultdict)


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


class Opened:
    """A container as its kind and its values."""

    def __init__(self, kind: Kind, values: list[Any]) -> None:
        self.kind = kind
        self.values = values


def opened(tree: Any) -> Any:
    """`tree` with every container that pytrees do not know opened, at any depth; others stay what they are."""
    if isinstance(tree, _DICTS) and type(tree) in SUPPORTED_NODES:
        return _with(tree, {name: opened(value) for name, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(opened(part) for part in tree)
    if type(tree) in SUPPORTED_NODES:
        return tree
    if isinstance(tree, Mapping):
        names = tuple(tree)
        return Opened(Kind(type(tree), names), [opened(tree[name]) for name in names])
    if is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in fields(tree))
        return Opened(Kind(type(tree), names), [opened(getattr(tree, name)) for name in names])
    return tree


def _with(tree: Any, values: dict[Any, Any]) -> Any:
    """A dict of the same class."""
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, values)
    return type(tree)(values)


def _flattened(container: Any) -> tuple[list[Any], Kind]:
    return container.values, container.kind


def _flattened_by_name(container: Any) -> tuple[list[tuple[Any, Any]], Kind]:
    pairs = zip(container.kind.names, container.values, strict=True)
    return [(MappingKey(name), value) for name, value in pairs], container.kind


register_pytree_node(
    Opened,
    _flattened,
    lambda values, kind: kind.build(values),
    flatten_with_keys_fn=_flattened_by_name,
)
