"""What passes are told in tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.compiler.context import Context, Options, Stages
from weft.compiler.hints import Hints
from weft.layout import SBP, Placement, placement

ONE = placement("cpu", [0])
NOTHING = Context(ONE, stages=Stages((ONE,)))


def asked(**options: Any) -> Context:
    """On one rank, with fields of `Options`."""
    return Context(ONE, Options(**options), stages=Stages((ONE,)))


def hinted(
    where: Placement, inputs: Mapping[str, tuple[SBP | None, ...]] | None = None, **options: Any
) -> Context:
    """In one stage, with layouts of inputs."""
    hints = {where.axes: Hints(inputs or {})}
    return Context(where, Options(**options), hints, stages=Stages((where,)))
