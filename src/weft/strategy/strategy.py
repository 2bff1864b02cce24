"""Strategies: which layouts the user fixes, as readable data that can be saved, loaded and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, final

import yaml

from weft.atomic_files import write_atomically
from weft.errors import LayoutError, StrategyError, UserError, shown, wrong
from weft.layout import SBP, broadcast, split
from weft.patterns import name_patterns
from weft.plain_yaml import load_yaml, read_plain_yaml
from weft.strategy.parts import Schedule, Stage, Zeros, hold
from weft.strategy.precision import Half, Precision
from weft.strategy.text import SBPs, checked_field, parse_field, plain

# Of files: 2 has `grid`, 3 `in_flight` and `zero` by patterns. Files are written in the first that has what they say.
FORMATS = (1, 2, 3)


@final
@dataclass(frozen=True)
class Strategy:
    """Name patterns and the layouts that they fix, stages, time and memory. The rest is deduced.

    Patterns (`*`, `?`, `[0-3]`; docs/patterns.md) are compared with whole names: those of tensors, of which the first
    that matches counts, or paths of modules, which cover everything below as well, except in `activations`. One SBP
    holds for every axis of the placement; a tuple gives one SBP for each axis.

    Attributes:
        batch: patterns of batch keys ("x", "[0].mask"; a batch that is one tensor has the key
            "batch").
        parameters: patterns of parameter and buffer names ("blocks.0.fc.weight").
        stages: the parts of a pipeline with their modules and placements, or the number of parts of equal cost.
        micro_batches: the number of micro-batches that the batch is cut into, along the first
            dimension of most of its tensors.
        schedule: order of the pipeline's work, "gpipe", "1f1b", "interleaved" or "zero_bubble";
            None for the one that weft computes.
        in_flight: for each stage, how many micro-batches may be between its forward and the end of its
            backward, such as (4, 3, 2, 1), which is "1f1b" of four stages; None for as many as the
            schedule gives. A larger number means all micro-batches.
        zero: how optimizer states, gradients and parameters are sharded: one `Zero` for all
            parameters, or patterns of parameters with a `Zero` each, None for those that stay whole, as
            those do that no pattern names: `{"*.bias": None, "*embed*": Zero(1), "*": Zero(3)}`. All
            shard along one axis.
        recompute: patterns of modules whose forward is recomputed in the backward.
        offload: patterns of modules whose activations are kept in host memory until the backward.
        precision: "bf16" or "fp16" for a forward under autocast, or a `weft.Precision` that says in which dtypes
            gradients and parameters are sent and are kept as well; None for the model's own.
        clip_norm: the largest norm of all gradients together.
        memory_limit: bytes of memory on each rank.
        activations: patterns of modules ("blocks.*.norm1"), for the layouts of their outputs.
        expert_capacity: rows of tokens that a rank may send to the experts of another, in shares of an even routing,
            such as 1.5; a step that wants to send more raises. None holds the maximum.
        signatures: signatures of single ops that override deduction, by the name of the op's first result in the
            graph, such as {"mm_3": "S(0), B -> S(0)"}: operands, then results; one for all axes or one for each.
        grid: the number of ranks along each axis of the placement that the strategy is for, such as
            (16, 8); () if unset.
    """

    batch: Mapping[str, SBPs] = field(default_factory=dict)
    parameters: Mapping[str, SBPs] = field(default_factory=dict)
    stages: Sequence[Stage] | int = ()
    micro_batches: int = 1
    schedule: Schedule | None = None
    in_flight: Sequence[int] | None = None
    zero: Zeros | None = None
    recompute: Sequence[str] = ()
    offload: Sequence[str] = ()
    precision: Precision | Half | None = None
    clip_norm: float | None = None
    memory_limit: int | None = None
    activations: Mapping[str, SBPs] = field(default_factory=dict)
    expert_capacity: float | None = None
    signatures: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    grid: Sequence[int] = ()

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        hold(self, **{name: checked_field(name, getattr(self, name)) for name in names})

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML: the layouts, and every other field that is set.

        Raises:
            UserError: it cannot be written.
        """
        write_atomically(path, self.to_text(), "the strategy")

    def to_text(self) -> str:
        """The text of a file of the strategy."""
        content: dict[str, Any] = {"weft_strategy": self._format}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("batch", "parameters") or value not in (each.default, {}):
                content[each.name] = plain(each.name, value)
        return yaml.safe_dump(content, sort_keys=False)

    @property
    def _format(self) -> int:
        if self.in_flight is not None or isinstance(self.zero, Mapping):
            return 3
        return 2 if self.grid else 1

    @staticmethod
    def load(path: str | Path) -> Strategy:
        """Read a file that `save` wrote.

        Raises:
            StrategyError: naming the file and the entry that cannot be read.
        """
        if not isinstance(path, str | Path):
            raise wrong("Strategy.load: path", "the path of a file", path, StrategyError)
        return _strategy(partial(read_plain_yaml, Path(path), _EXPECTED), path)

    @staticmethod
    def from_text(text: str, path: str | Path) -> Strategy:
        """The strategy of a file's text.

        Args:
            text: as `to_text` gives it.
            path: its name in errors.

        Raises:
            StrategyError: naming the file and the entry that cannot be read.
        """
        if not isinstance(text, str):
            raise wrong(
                "Strategy.from_text: text", "a text, as to_text gives it", text, StrategyError
            )
        return _strategy(partial(load_yaml, text, str(path), _EXPECTED), path)


# What a file should be, for errors.
_EXPECTED = "a file that Strategy.save wrote"


def _strategy(read: Callable[[], Any], path: str | Path) -> Strategy:
    """The strategy that a file's content describes."""
    try:
        content = read()
    except UserError as error:
        raise StrategyError(f"cannot read the strategy: {error}") from error
    form = content.pop("weft_strategy", None) if isinstance(content, dict) else None
    if isinstance(form, bool) or form not in FORMATS:
        raise StrategyError(
            f"{path} is not a strategy: it must begin with weft_strategy: {FORMATS[-1]} (or an earlier format), as "
            "Strategy.save writes it"
        )
    known = [each.name for each in fields(Strategy)]
    unknown = sorted(str(name) for name in content if name not in known)
    if unknown:
        raise StrategyError(
            f"{path} has unknown entries: {', '.join(unknown)}; expected some of {', '.join(known)}"
        )
    found = {name: _entry(path, name, value) for name, value in content.items()}
    try:
        return Strategy(**found)
    except StrategyError as error:
        raise StrategyError(f"cannot read the strategy {path}: {error}") from error


def _entry(path: str | Path, name: str, value: Any) -> Any:
    """A field from its entry in a file."""
    try:
        return parse_field(name, value)
    except (LayoutError, StrategyError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise StrategyError(
            f"cannot read the strategy {path}: {name}: {shown(value)} is not as Strategy.save writes it ({error}); "
            "give a file that it wrote"
        ) from error


def stage_count(strategy: Strategy) -> int:
    """The number of stages; 1 where nothing says any."""
    stages = strategy.stages
    return stages if isinstance(stages, int) else max(len(stages), 1)


def data_parallel() -> Strategy:
    """The batch split over all ranks, every parameter whole on each."""
    return Strategy(batch={"*": split(0)}, parameters={"*": broadcast})


def tensor_parallel(
    columns: Iterable[str], rows: Iterable[str] = (), sequence: int | None = None
) -> Strategy:
    """Linear layers split over all ranks, the batch whole on each (Megatron-LM, section 3).

    Args:
        columns: patterns of `nn.Linear` modules whose outputs are split: weight and bias S(0).
        rows: patterns of `nn.Linear` modules whose inputs are split: weight S(1), bias whole.
        sequence: the dimension of positions in what `rows` return, 1 for [batch, time, width].
            Activations stay split along it up to the next layer in `columns`, norms and dropout
            included (sequence parallelism, Korthikanti et al. 2022); None for whole activations.

    Raises:
        StrategyError: when patterns are no list of texts.
    """
    columns, rows = name_patterns("columns", columns), name_patterns("rows", rows)
    laid = {} if sequence is None else {pattern: split(sequence) for pattern in rows}
    linears = _linears(columns, rows, ())
    return Strategy(batch={"*": broadcast}, parameters=linears, activations=laid)


def hybrid_parallel(
    columns: Iterable[str], rows: Iterable[str] = (), sequence: int | None = None
) -> Strategy:
    """Data parallel along the first axis of a two-axis placement, tensor parallel along the second.

    Args:
        columns: as in `tensor_parallel`.
        rows: as in `tensor_parallel`.
        sequence: as in `tensor_parallel`.
    """
    columns, rows = name_patterns("columns", columns), name_patterns("rows", rows)
    laid = {} if sequence is None else {pattern: (split(0), split(sequence)) for pattern in rows}
    linears = _linears(columns, rows, (broadcast,))
    return Strategy(batch={"*": (split(0), broadcast)}, parameters=linears, activations=laid)


def expert_parallel(experts: Iterable[str], capacity: float | None = None) -> Strategy:
    """Data parallel, but for the experts of a mixture, which are split over the ranks (GShard, section 3).

    Tokens go to the ranks of their experts and come back by all-to-all, in buffers of fixed size.

    Args:
        experts: patterns of the parameters that hold all experts in their first dimension.
        capacity: how many times the rows of an even routing a rank's buffer for another holds, such as 1.5; a step
            that wants to send more raises. None holds the maximum: no routing raises, but the buffers are larger.
    """
    parameters: dict[str, SBPs] = {p: split(0) for p in name_patterns("experts", experts)}
    return Strategy(
        batch={"*": split(0)},
        parameters={**parameters, "*": broadcast},
        expert_capacity=capacity,
    )


def context_parallel(
    sequence: int = 1,
    data: bool = False,
    columns: Iterable[str] = (),
    rows: Iterable[str] = (),
    whole: Iterable[str] = (),
) -> Strategy:
    """The tokens of each sequence split over the ranks, every parameter whole on each.

    Attention sees the whole sequence: either keys and values are gathered ("The Llama 3 Herd of
    Models", section 3.3.2), or queries, keys and values go to the ranks by heads and come back
    (DeepSpeed-Ulysses, arXiv 2309.14509), whichever moves fewer bytes.

    Args:
        sequence: the dimension of positions in the entries of the batch.
        data: true if the placement's first axis splits the batch; the sequence then is split along the second.
        columns: as in `tensor_parallel`, along one more axis, the last.
        rows: as in `tensor_parallel`.
        whole: patterns of entries of the batch that have no positions, and are not split along them.
    """
    columns, rows = name_patterns("columns", columns), name_patterns("rows", rows)
    whole = name_patterns("whole", whole)
    if not isinstance(data, bool):
        raise wrong("data", "True or False", data, StrategyError)
    outer: tuple[SBP, ...] = (split(0),) if data else ()
    inner: tuple[SBP, ...] = (broadcast,) if columns or rows else ()

    def on(sbp: SBP) -> SBPs:
        return (*outer, sbp, *inner) if outer or inner else sbp

    batch = {**dict.fromkeys(whole, on(broadcast)), "*": on(split(sequence))}
    linears = _linears(columns, rows, (broadcast,) * (1 + len(outer)))
    return Strategy(batch=batch, parameters={**linears, "*": broadcast})


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
