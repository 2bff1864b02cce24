"""One op of the OpInfo database against plain torch: every sample, in many layouts, and every signature it declares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

import weft
from tools.opinfo.decompositions import decomposition_problems
from tools.opinfo.interpret import run_programs
from tools.opinfo.layouts import Trial, local_tensors, placement_of, trials, with_partials
from tools.opinfo.reference import Expected, captured, constants, expected
from tools.opinfo.running import GRIDS, RANKS, alone, programs
from tools.opinfo.samples import Case, cases, full_name
from tools.opinfo.splitting import Splitting, has_splits
from tools.oracles.rules import TorchCall, check_call, close, split_again
from tools.oracles.strides import stride_problems
from weft.capture.capture import Captured
from weft.compiler.decompositions.fused_losses import fuse_class_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box, deduce
from weft.compiler.local.localize import communicators, localize
from weft.compiler.signatures import check_signatures
from weft.errors import BatchError, CaptureError, LayoutError, RuleError
from weft.ir import verify
from weft.ir.logical import Call, Input, LogicalGraph, Output
from weft.ir.nodes import HINT
from weft.layout import SBP, Broadcast, Layout, Partial, Placement
from weft.runtime.torch_ops import to_torch

_PLACE = re.compile(r"(^|( at)? )/\S+:\d+\b:? ?")
Refusal = (BatchError, CaptureError, LayoutError, RuleError)
# Their values are whatever memory held.
UNINITIALIZED = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass
class OpReport:
    """What became of an op's samples.

    Attributes:
        right: number of samples that are right in all layouts.
        shapes: those of them that plain torch can only be compared with in shape and dtype.
        ran: runs of whole programs on several ranks among the comparisons.
        refused: why samples were refused, each with its number.
        wrong: one line for each thing that is wrong.
        skipped: samples that plain torch does not run.
        seconds: how long the check took.
        splitting: what splits, and what is gathered.
    """

    name: str
    right: int = 0
    shapes: int = 0
    ran: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    splitting: Splitting = field(default_factory=Splitting)

    @property
    def verdict(self) -> str:
        """right, shape, partly, refused or wrong."""
        if self.wrong:
            return "wrong"
        if self.refused or not self.right:
            return "partly" if self.right else "refused"
        return "shape" if self.shapes == self.right else "right"


@dataclass(frozen=True)
class Effort:
    """How many samples of an op, how many layouts of a sample, and how many samples run as programs."""

    samples: int = 6
    layouts: int = 6
    programs: int = 2


def check_op(info: Any, effort: Effort) -> OpReport:
    """Check an op; nothing but a crash of the process gets out of it."""
    report = OpReport(full_name(info))
    # Further ones are only looked at for what splits, where the first have little to split.
    for number, case in enumerate(cases(info, 3 * effort.samples)):
        if number < effort.samples:
            _check_case(case, effort, report)
        elif not report.wrong and report.splitting.samples < effort.samples:
            _check_splitting(case, report)
    if not report.right and not report.refused and not report.wrong:
        report.refused["no sample that plain torch runs"] = 1
    return report


def _check_splitting(case: Case, report: OpReport) -> None:
    if has_splits(shapes_of(case)):
        with suppress(Exception):  # of plain torch, or a refusal: as the first samples say
            report.splitting.add(captured(case, expected(case).seeds)[0].graph, shapes_of(case))


def shapes_of(case: Case) -> dict[str, tuple[int, ...]]:
    """The shapes of a sample's tensors, by the keys that they have in its graph."""
    return {f"x{i}": tuple(x.shape) for i, x in enumerate(case.tensors)}


def _check_case(case: Case, effort: Effort, report: OpReport) -> None:
    try:
        known = expected(case)
    except Exception:  # whatever the op makes of its own sample
        report.skipped += 1
        return
    try:
        found, inputs = captured(case, known.seeds)
        problem = next(problems(case, known, found, inputs, effort), "")
        if not problem:
            report.splitting.add(found.graph, shapes_of(case))
        if not problem and report.right < effort.programs:
            problem = next(_program_problems(case, known, found), "")
            report.ran += len(GRIDS)
    except Refusal as error:
        reason = reason_of(error)
        report.refused[reason] = report.refused.get(reason, 0) + 1
        return
    except Exception as error:  # every other error is a bug
        problem = f"{case.describe()}: {type(error).__name__}: {str(error)[:300]}"
    if problem:
        report.wrong.append(problem)
    else:
        report.right += 1
        report.shapes += is_blank(case) or is_random(found)


def is_blank(case: Case) -> bool:
    """Whether the values are whatever memory held."""
    return case.name.split(".")[0] in UNINITIALIZED


def is_random(found: Captured) -> bool:
    """Whether weft draws numbers, which plain torch draws otherwise."""
    return any(node.op == "weft.uniform" for node in found.graph.of_kind(Call))


def reason_of(error: Exception) -> str:
    """The reason of a refusal in one line, without places in the source."""
    lines = _PLACE.sub("", str(error)).splitlines()
    return shortened(f"{type(error).__name__}: {lines[-1].strip()}")


def shortened(text: str, length: int = 200) -> str:
    """A text of at most this length, cut at a word."""
    return text if len(text) <= length else text[: length - 1].rsplit(" ", 1)[0] + " …"


def problems(
    case: Case, known: Expected, found: Captured, inputs: Mapping[str, Tensor], effort: Effort
) -> Iterator[str]:
    """What is wrong with a sample: on one rank, in its signatures, kernels and decompositions, in the layouts."""
    one = Trial((1,), {key: (Broadcast(),) for key in inputs})
    values = run(found.graph, one, inputs)[0]
    named = {node.key: values[node.value.name] for node in found.graph.of_kind(Output)}
    if is_blank(case):
        yield from _shapes(case, "captured", named, known.values)
        return
    if is_random(found):
        yield from _shapes(case, "captured", named, known.values)
    else:
        yield from _differences(case, "captured", {**named, **constants(found)}, known.values)
    calls = chain(
        signature_problems(found.graph, values),
        stride_problems(found.graph, values),
        decomposition_problems(case),
    )
    for line in calls:
        yield f"{case.describe()}: {line}"
    for trial in trials(inputs, effort.layouts, case.key):
        found_outputs: dict[str, str] = {}
        every = run(found.graph, trial, inputs, found_outputs)
        for rank, held in enumerate(every):
            made = {key: held[name] for key, name in found_outputs.items()}
            yield from _differences(case, f"{trial} rank {rank}", made, named)


def _program_problems(case: Case, known: Expected, found: Captured) -> Iterator[str]:
    """What is wrong where actors run the sample on four ranks, beside plain torch; random ops beside one rank."""
    random = is_random(found)
    with weft.local_world(RANKS):
        right = alone(case, known.seeds) if random else known.values
        for where, made in programs(case, known.seeds):
            if is_blank(case):
                yield from _shapes(case, f"program {where}", made, right)
            else:
                yield from _differences(case, f"program {where}", made, right)


def _differences(
    case: Case, where: str, found: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> Iterator[str]:
    for name in dict.fromkeys((*known, *found)):
        if name not in found or name not in known:
            present = found.get(name, known.get(name))
            if present is not None and "gradient" in name and not present.any():
                continue  # no gradient and a gradient of zeros are the same
            yield f"{case.describe()} {where}: {name} is missing on one side"
        elif not close(found[name], known[name].resolve_conj().resolve_neg(), 1e-3):
            yield f"{case.describe()} {where}: {name} differs"


def _shapes(
    case: Case, where: str, found: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> Iterator[str]:
    for name in found.keys() & known.keys():
        a, b = found[name], known[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{case.describe()} {where}: {name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"


# ------------------------------------------------------------------------------------- signatures

_SEEN: set[Any] = set()


def signature_problems(graph: LogicalGraph, values: Mapping[str, Tensor]) -> Iterator[str]:
    """Every declared signature of every call, on its real operands: along an axis of 4, and of 2 x 2."""
    for node in graph.of_kind(Call):
        call = node.first
        if call in _SEEN or node.op == HINT:
            continue
        _SEEN.add(call)
        tensors = [values[name] for name in node.operands]
        kwargs = tuple((name, to_torch(value, tensors)) for name, value in call.kwargs)
        sample = TorchCall(call.op, to_torch(call.args, tensors), kwargs)
        yield from check_call(sample, 4, empty=True).mismatches
        for inner in split_again(sample, 2):
            yield from check_call(inner, 2, empty=True).mismatches


# ---------------------------------------------------------------------------------------- layouts


def run(
    graph: LogicalGraph,
    trial: Trial,
    inputs: Mapping[str, Tensor],
    outputs: dict[str, str] | None = None,
) -> list[dict[str, Tensor]]:
    """Compile a graph with inputs laid out as in `trial` and run all ranks; fills `outputs`: name by key."""
    placement = placement_of(trial.grid)
    laid = {node.key: Layout(placement, trial.layouts[node.key]) for node in graph.of_kind(Input)}
    graph = with_partials(graph, laid)
    hints = Hints({key: _admissible(layout) for key, layout in laid.items()})
    graph, assignment = expand(*fuse_class_losses(graph, deduce(graph, hints, placement)))
    by_name = {node.value.name: laid[node.key] for node in graph.of_kind(Input)}
    # Inputs in layouts that hints do not admit (sums) are boxed to what was deduced.
    assignment = replace(assignment, values={**assignment.values, **by_name})
    boxed = check_signatures(verify(box(graph, assignment), with_layouts=True))
    groups = communicators(boxed)
    programs = [localize(boxed, rank, groups) for rank in placement.ranks]
    local = _local_inputs(inputs, laid, placement)
    if outputs is not None:
        outputs.update({output.key: output.name for output in programs[0].outputs})
    return run_programs(programs, groups, local)


def _local_inputs(
    inputs: Mapping[str, Tensor], laid: Mapping[str, Layout], placement: Placement
) -> list[dict[str, Tensor]]:
    parts = {
        key: local_tensors(inputs[key], layout, number)
        for number, (key, layout) in enumerate(laid.items())
    }
    return [{key: shards[rank] for key, shards in parts.items()} for rank in placement.ranks]


def _admissible(layout: Layout) -> tuple[SBP, ...]:
    """The layout as a hint for an input: Partial stands as Broadcast."""
    return tuple(Broadcast() if isinstance(sbp, Partial) else sbp for sbp in layout.sbp)


torch.set_num_threads(1)
