"""Name patterns: one grammar for all that a user names, from entries of a batch to modules of the model.

A pattern is compared with the whole dotted name. `*` stands for any characters, dots included, `?`
for one, `[0-3]` for one of a range, `[!0]` for any other; brackets may also stand for themselves,
as in "[0].mask", the key of a leaf. Upper and lower case differ.

- Tensors (`batch`, `parameters`, `Buckets.values`, `distribute`): the pattern `matches` the name of
  the tensor itself; "blocks.0.*" names all below "blocks.0". The first pattern that matches counts.
- Modules with what they return or make again (`activations`, `recompute`): the pattern `matches`
  the path of the module; the outermost such module counts. "blocks.*" is each block.
- Modules as places (`stages`, `offload`, `explain(op=)`): the pattern `covers` the module that it
  names and all below; "embed.*" covers what "embed" itself computes as well.

Names are those of the model without torch.compile around parts of it; patterns may be of either form.

A pattern that names nothing is an error with names that come close (`check_named`); "*" alone, for
all there may be, is none. docs/patterns.md says the same with examples.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Set
from fnmatch import fnmatchcase

from weft.errors import StrategyError, wrong


def without_wrappers(name: str) -> str:
    """A name of a model as it is where no part of it is in torch.compile, which adds a word to the names in it."""
    return name.replace("_orig_mod.", "")


def matches(pattern: str, name: str) -> bool:
    """True if a pattern names just this: the whole name fits."""
    pattern = without_wrappers(pattern)
    return fnmatchcase(name, pattern) or (
        "[" in name and fnmatchcase(name, pattern.replace("[", "[[]"))
    )


def covers(pattern: str, path: str) -> bool:
    """True if a pattern names this, or a module around it; "embed.*" covers the module "embed" too.

    The model itself, the path "", is covered by nothing.
    """
    return any(stands_for(pattern, one) for one in around(path))


def stands_for(pattern: str, path: str) -> bool:
    """True if a pattern names this module itself; "embed.*" names the module "embed" too."""
    return matches(pattern, path) or matches(pattern.removesuffix(".*"), path)


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """The first pattern that matches a name: the one that counts."""
    return next((pattern for pattern in patterns if matches(pattern, name)), None)


def around(path: str) -> Iterator[str]:
    """The modules around a path and the path itself, outermost first: "a", "a.b", "a.b.c"."""
    parts = path.split(".") if path else []
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def check_named(
    where: str,
    pattern: str,
    names: Iterable[str],
    kind: str,
    names_it: Callable[[str, str], bool] = matches,
) -> None:
    """Refuse a pattern that names nothing.

    Args:
        where: the pattern as the user gave it: "recompute=['block.*']".
        pattern: the pattern.
        names: all possible names.
        kind: of these, in the plural: "modules".
        names_it: `matches` or `covers`.

    Raises:
        StrategyError: with the names that come close, or some of all.
    """
    known = sorted(set(names) - {""})
    if pattern == "*" or any(names_it(pattern, name) for name in known):
        return
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:5]
    below = any(covers(pattern, name) for name in known)
    raise StrategyError(
        f"{where} matches nothing; {kind} that exist: {', '.join(near) or 'none'}"
        + (f"; {pattern + '.*'!r} names all below it" if below else "")
    )


def name_patterns(where: str, patterns: object) -> tuple[str, ...]:
    """Name patterns, in their order, as a tuple.

    Raises:
        StrategyError: when they are anything else, such as a single string.
    """
    every = tuple(patterns) if isinstance(patterns, list | tuple | Set | Iterator) else (None,)
    if not all(isinstance(one, str) for one in every):
        raise wrong(where, 'a list of name patterns such as ["blocks.*"]', patterns, StrategyError)
    return every
