"""Costs that a user gives in a file in place of a machine's: of ops, of modules, of stages, of exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

from weft.errors import UserError, wrong
from weft.hardware.devices import read_yaml
from weft.ir.plan_nodes import COLLECTIVE_KINDS
from weft.schema import OneOf, read
from weft.units import Seconds

# The phase that seconds of a stage or module are for; "weight" is the part of the backward that makes the
# gradients of parameters.
WORK_KINDS = ("forward", "backward", "weight", "update")
EXCHANGE_KINDS = (*COLLECTIVE_KINDS, "transfer")
_Work: TypeAlias = Mapping[Annotated[str, OneOf(WORK_KINDS)], Seconds]


@final
@dataclass(frozen=True)
class CostOverrides:
    """User-defined costs. The larger unit takes precedence: a stage's seconds are those of all modules and ops in it.

    Attributes:
        ops: seconds of one call of an op on a rank, whatever its shapes.
        modules: by name pattern of modules, which must match the whole path: seconds of one
            micro-batch on a rank, by kind of work.
        stages: by stage, or "*" for all others: the same.
        exchanges: seconds of one exchange of a kind, buckets counted as one.
        source: the file.
    """

    ops: Mapping[str, Seconds] = field(default_factory=dict)
    modules: Mapping[str, _Work] = field(default_factory=dict)
    stages: Mapping[str, _Work] = field(default_factory=dict)
    exchanges: Mapping[Annotated[str, OneOf(EXCHANGE_KINDS)], Seconds] = field(default_factory=dict)
    source: str = "given costs"

    def of_stage(self, stage: int) -> Mapping[str, Seconds]:
        """The seconds of a stage, by kind of work; those for all stages where it has none of its own."""
        return self.stages.get(str(stage)) or self.stages.get("*") or {}


def read_cost_overrides(path: str | Path) -> CostOverrides:
    """The costs of a file.

    Raises:
        UserError: when it cannot be read, or a field is unknown or out of range; the message names
            file, key, what was expected and what was given.
    """
    return parse_cost_overrides(read_yaml(Path(path)), str(path))


def parse_cost_overrides(content: Any, where: str) -> CostOverrides:
    """The costs of a file's content; `where` is named in errors.

    Raises:
        UserError: when a field is unknown or out of range.
    """
    found = read(CostOverrides, content, where)
    if not content:
        raise UserError(f"{where} must have one or more of ops, modules, stages, exchanges")
    for name in found.stages:
        if name != "*" and not (name.isascii() and name.isdigit()):
            raise wrong(f"{where}: stages: a key", "a stage's number in quotes, or '*'", name)
    return replace(found, source=where)
