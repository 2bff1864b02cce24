"""The public names and their signatures: what changes here, users notice (docs/versioning.md)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import weft
from weft import errors
from weft.program.loop import logs


def lines() -> Iterator[str]:
    for name in sorted(weft.__all__):
        if name.startswith("_"):
            continue
        found = getattr(weft, name)
        if isinstance(found, ModuleType):
            yield f"weft.{name}"
        else:
            yield from described(f"weft.{name}", found)
    for module in (errors, logs):
        short = module.__name__.rpartition(".")[2]
        for name, found in sorted(vars(module).items()):
            if inspect.isclass(found) and package(found.__module__) == package(module.__name__):
                yield from described(f"weft.{short}.{name}", found)


def package(module: str) -> str:
    """Where a module lies: what one takes from beside it is its own."""
    return module.rpartition(".")[0]


def is_inner(base: type) -> bool:
    """True for a class of weft's that has no public name: what inherits from it has its members as its own."""
    public = any(hasattr(module, base.__name__) for module in (weft, errors, logs))
    return base.__module__.startswith("weft.") and not public


def described(name: str, found: Any) -> Iterator[str]:
    """A line for a function or value; for a class one for each public member of its own too."""
    if not inspect.isclass(found):
        yield f"{name}{signature(found)}" if callable(found) else f"{name}: {type(found).__name__}"
        return
    inner = [base for base in found.__mro__[1:] if is_inner(base)]
    bases = ", ".join(base.__name__ for base in found.__bases__ if base not in (object, *inner))
    yield f"{name}({bases})" if bases else name
    members = {name: x for kind in (*reversed(inner), found) for name, x in vars(kind).items()}
    for member, value in sorted(members.items()):
        if member == "__init__" and "__dataclass_fields__" not in vars(found):
            yield f"    {name}{signature(value)}"
        if member.startswith("_"):
            continue
        own = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(own, property):
            yield f"    {name}.{member}"
        elif callable(own):
            yield f"    {name}.{member}{signature(own)}"
    for field in vars(found).get("__dataclass_fields__", ()):
        if not field.startswith("_"):
            yield f"    {name}.{field}"


def signature(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults of parameters; annotations may become more exact."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_public_names_and_signatures(golden: Callable[[str, str], None]) -> None:
    golden("\n".join(dict.fromkeys(lines())), "api")
