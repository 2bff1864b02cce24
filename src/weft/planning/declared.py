"""Rules of ops that a user declared, as plain data: a graph file brings those of its ops along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, final

from weft.errors import RuleError, UserError
from weft.layout import Reduction
from weft.ops import runs_whole
from weft.ops.rule import Rule, declared_rules, has_rule, rule
from weft.schema import read

_OWN = {each.name: each.default for each in fields(Rule)}
_Places: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True)
class _PlainRule:
    """The fields of a rule that can be data."""

    factors: str
    linear: tuple[_Places, ...] = ()
    lossy: bool = False
    added: _Places = ()
    monotone: tuple[_Places, ...] = ()
    extrema: tuple[Reduction, ...] = ()
    reduction: Reduction = "sum"
    ignored: _Places = ()
    anyhow: _Places = ()
    kept: _Places = ()
    readers: tuple[str, ...] = ()
    places: _Places = ()
    view: bool = False
    shares: bool = False


def rules_for(ops: frozenset[str]) -> dict[str, dict[str, Any]]:
    """The rules of those of `ops` that somebody declared, as plain data by op.

    Raises:
        UserError: when a field of one is a function.
    """
    return {op: _plain(op, found) for op, found in sorted(declared_rules().items()) if op in ops}


def _plain(op: str, found: Rule) -> dict[str, Any]:
    given = {name: getattr(found, name) for name in _OWN}
    content = {name: value for name, value in given.items() if value != _OWN[name]}
    for name, value in content.items():
        if callable(value):
            raise UserError(
                f"the rule of {op} cannot stand in a graph file: its field {name!r} is the function "
                f"{getattr(value, '__qualname__', value)}, expected plain data; declare it as text, such as "
                f'weft.rule("{op}", "m k+, k n -> m n")'
            )
    return content


def declare(where: str, rules: Mapping[str, Any]) -> None:
    """Declare the rules that `rules_for` gave, with lists for tuples, as `weft.rule` does.

    Raises:
        UserError: when something else stands there, or another rule of the op is declared here.
    """
    known = declared_rules()
    for op, content in rules.items():
        found = read(_PlainRule, content, f"{where}: the rule of {op!r}")
        options = {name: getattr(found, name) for name in content}
        if op in known and _plain(op, known[op]) != options:
            raise UserError(
                f"{where}: it holds the rule {options['factors']!r} of {op}, another one than is declared here; "
                "capture the step again with this one"
            )
        if op not in known:
            rule(op, **options)


def check_rules(where: str, ops: frozenset[str]) -> None:
    """Check that each op has a rule, or runs whole.

    Raises:
        RuleError: names the first that has none.
    """
    for op in sorted(ops):
        if not (has_rule(op) or runs_whole(op)):
            raise RuleError(
                f"{where}: the op {op} has no sharding rule; declare one where the step is captured, such as "
                f'weft.rule("{op}", "m k+, k n -> m n"), and capture it again'
            )
