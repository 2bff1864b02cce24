"""Nested containers (pytrees) of what users pass in and get back, flattened to leaves with readable keys.

The only user of `torch.utils._pytree`; needs `tree_flatten_with_path`, `tree_unflatten` and the
three key classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten_with_path,
    tree_unflatten,
)

from weft.capture.containers import opened

Tree: TypeAlias = TreeSpec


@dataclass(frozen=True, slots=True)
class Static:
    """A leaf that is no tensor: baked into the graph, or handed back as it was."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"the constant {self.value!r}"


def flatten(tree: Any, root: str) -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves of `tree` with their keys ("x", "a.b", "[0]", "[1].mask"; `root` for a bare leaf), and its shape."""
    paths, spec = tree_flatten_with_path(opened(tree))
    return [(_key(path) or root, leaf) for path, leaf in paths], spec


def unflatten(leaves: list[Any], spec: Tree) -> Any:
    """Put leaves back in the containers that `flatten` took them from."""
    return tree_unflatten(leaves, spec)


def _key(path: tuple[Any, ...]) -> str:
    return "".join(map(_part, path)).removeprefix(".")


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
