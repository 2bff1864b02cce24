"""Strategies: which layouts the user fixes, as readable data that can be saved, loaded and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from weft.errors import LayoutError, StrategyError
from weft.layout import SBP, Broadcast, Partial, Split, broadcast, parse_sbp, split

# One SBP for every axis of the grid, or one for each.
SBPs: TypeAlias = SBP | tuple[SBP, ...]

FORMAT = 1


@dataclass(frozen=True)
class Strategy:
    """Name patterns and the layouts that they fix. What no pattern names is deduced.

    Patterns are shell-like (`*`, `?`, `[0-3]`) and match the whole name; the first that matches
    counts. One SBP stands for every axis of the placement; a tuple gives one SBP for each axis.

    Attributes:
        batch: patterns of batch keys ("x", "[0].mask"; a batch that is one tensor has the key
            "batch").
        parameters: patterns of parameter and buffer names ("blocks.0.fc.weight").
    """

    batch: Mapping[str, SBPs] = field(default_factory=dict)
    parameters: Mapping[str, SBPs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("batch", "parameters"):
            patterns = getattr(self, name)
            if not isinstance(patterns, Mapping):
                raise StrategyError(
                    f"{name}= takes a mapping from name patterns to SBPs, found {patterns!r}"
                )
            checked = {pattern: _checked(name, pattern, sbp) for pattern, sbp in patterns.items()}
            object.__setattr__(self, name, checked)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML."""
        content = {
            "weft_strategy": FORMAT,
            "batch": _plain(self.batch),
            "parameters": _plain(self.parameters),
        }
        Path(path).write_text(yaml.safe_dump(content, sort_keys=False))

    @staticmethod
    def load(path: str | Path) -> Strategy:
        """Read what `save` wrote.

        Raises:
            StrategyError: naming the file and the entry that cannot be read.
        """
        try:
            content = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise StrategyError(f"cannot read the strategy {path}: {error}") from error
        if not isinstance(content, dict) or content.get("weft_strategy") != FORMAT:
            raise StrategyError(
                f"{path} is no strategy: it must begin with weft_strategy: {FORMAT}"
            )
        unknown = set(content) - {"weft_strategy", "batch", "parameters"}
        if unknown:
            raise StrategyError(f"{path} has unknown entries: {', '.join(sorted(unknown))}")
        try:
            batch, parameters = (_parsed(content.get(key)) for key in ("batch", "parameters"))
        except (LayoutError, TypeError, AttributeError) as error:
            raise StrategyError(f"cannot read the strategy {path}: {error}") from error
        return Strategy(batch, parameters)


def data_parallel() -> Strategy:
    """The batch split over all ranks, every parameter whole on each."""
    return Strategy(batch={"*": split(0)}, parameters={"*": broadcast})


def tensor_parallel(columns: Iterable[str], rows: Iterable[str] = ()) -> Strategy:
    """Linear layers split over all ranks, the batch whole on each (Megatron-LM, section 3).

    Args:
        columns: patterns of `nn.Linear` modules whose outputs are split: weight and bias S(0).
        rows: patterns of `nn.Linear` modules whose inputs are split: weight S(1), bias whole.
    """
    return Strategy(batch={"*": broadcast}, parameters=_linears(columns, rows, ()))


def hybrid_parallel(columns: Iterable[str], rows: Iterable[str] = ()) -> Strategy:
    """Data parallel along the first axis of a two-axis placement, tensor parallel along the second.

    Args:
        columns: as in `tensor_parallel`.
        rows: as in `tensor_parallel`.
    """
    return Strategy(
        batch={"*": (split(0), broadcast)}, parameters=_linears(columns, rows, (broadcast,))
    )


def _linears(
    columns: Iterable[str], rows: Iterable[str], outer: tuple[SBP, ...]
) -> dict[str, SBPs]:
    def on(sbp: SBP) -> SBPs:
        return (*outer, sbp) if outer else sbp

    found: dict[str, SBPs] = {}
    for pattern in columns:
        found |= {f"{pattern}.weight": on(split(0)), f"{pattern}.bias": on(split(0))}
    for pattern in rows:
        found |= {f"{pattern}.weight": on(split(1)), f"{pattern}.bias": on(broadcast)}
    return found


def _checked(name: str, pattern: object, sbp: object) -> SBPs:
    if not isinstance(pattern, str):
        raise StrategyError(f"{name}= takes names as keys, found {pattern!r}")
    if isinstance(sbp, Split | Broadcast | Partial):
        return sbp
    parts = tuple(sbp) if isinstance(sbp, list | tuple) else ()
    if not parts or not all(isinstance(part, Split | Broadcast | Partial) for part in parts):
        raise StrategyError(
            f"{name}={{{pattern!r}: …}} takes weft.split(dim), weft.broadcast or a tuple of them "
            f"with one entry for each axis of the placement, found {sbp!r}"
        )
    return parts


def _plain(patterns: Mapping[str, SBPs]) -> dict[str, Any]:
    return {
        pattern: [str(part) for part in sbp] if isinstance(sbp, tuple) else str(sbp)
        for pattern, sbp in patterns.items()
    }


def _parsed(patterns: Any) -> dict[str, SBPs]:
    return {
        pattern: tuple(map(parse_sbp, text)) if isinstance(text, list) else parse_sbp(text)
        for pattern, text in (patterns or {}).items()
    }
