"""One op of the OpInfo database against plain torch: every sample, in many layouts, and every signature it declares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tools.opinfo.decompositions import decomposition_problems
from tools.opinfo.interpret import run_programs
from tools.opinfo.layouts import Trial, local_tensors, placement_of, trials
from tools.opinfo.reference import Expected, captured, constants, expected
from tools.opinfo.samples import Case, cases, full_name
from tools.oracles.rules import TorchCall, check_call, close, split_again
from tools.oracles.strides import stride_problems
from weft.capture.capture import Captured
from weft.compiler.families.class_loss import fuse_class_losses
from weft.compiler.families.table import expand
from weft.compiler.hints import Hints
from weft.compiler.layouts.box import box
from weft.compiler.layouts.deduce import deduce
from weft.compiler.local.communicators import communicators
from weft.compiler.local.localize import localize
from weft.compiler.signatures import check_signatures
from weft.errors import BatchError, CaptureError, LayoutError, RuleError
from weft.ir import verify
from weft.ir.logical import Call, Input, LogicalGraph, Output, Ref, Value, node_uses
from weft.ir.nodes import HINT, Hint
from weft.ir.queries.op_calls import op_call, operand_names
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
        refused: why samples were refused, each with its number.
        wrong: one line for each thing that is wrong.
        skipped: samples that plain torch does not run.
        seconds: how long the check took.
    """

    name: str
    right: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """right, partly, refused or wrong."""
        if self.wrong:
            return "wrong"
        if self.refused:
            return "partly" if self.right else "refused"
        return "right" if self.right else "refused"


@dataclass(frozen=True)
class Effort:
    """How many samples of an op, and how many layouts of a sample."""

    samples: int = 6
    layouts: int = 6


def check_op(info: Any, effort: Effort) -> OpReport:
    """Check an op; nothing but a crash of the process gets out of it."""
    report = OpReport(full_name(info))
    for case in cases(info, effort.samples):
        _check_case(case, effort, report)
    if not report.right and not report.refused and not report.wrong:
        report.refused["no sample that plain torch runs"] = 1
    return report


def _check_case(case: Case, effort: Effort, report: OpReport) -> None:
    try:
        known = expected(case)
    except Exception:  # whatever the op makes of its own sample
        report.skipped += 1
        return
    try:
        found, inputs = captured(case, known.seeds)
        problem = next(problems(case, known, found, inputs, effort), "")
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
    random = any(node.op == "weft.uniform" for node in found.graph.of_kind(Call))
    if case.name.split(".")[0] in UNINITIALIZED:
        return
    known_values = known.values
    if random:
        yield from _shapes(case, named, known_values)
    else:
        yield from _differences(case, "captured", {**named, **constants(found)}, known_values)
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


def _shapes(case: Case, found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> Iterator[str]:
    for name in found.keys() & known.keys():
        a, b = found[name], known[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{case.describe()} captured: {name} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"


# ------------------------------------------------------------------------------------- signatures

_SEEN: set[Any] = set()


def signature_problems(graph: LogicalGraph, values: Mapping[str, Tensor]) -> Iterator[str]:
    """Every declared signature of every call, on its real operands: along an axis of 4, and of 2 x 2."""
    for node in graph.of_kind(Call):
        call = op_call(graph, node)
        if call in _SEEN or node.op == HINT:
            continue
        _SEEN.add(call)
        tensors = [values[name] for name in operand_names(node)]
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
    graph = _with_partials(graph, laid)
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


def _with_partials(graph: LogicalGraph, laid: Mapping[str, Layout]) -> LogicalGraph:
    """The graph with a hint behind every input that is Partial, so that deduction carries the sum on."""
    nodes: list[Any] = []
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node, Input):
            nodes.append(node)
            continue
        if nodes and isinstance(nodes[-1], Input):
            for given in graph.of_kind(Input):
                hint = _hint(given, laid[given.key])
                if hint is not None and hint.outputs[0] is not None:
                    renamed[given.value.name] = hint.outputs[0].name
                    nodes.append(hint)
        nodes.append(_rename(node, renamed))
    return LogicalGraph(graph.name, tuple(nodes)) if renamed else graph


def _hint(node: Input, layout: Layout) -> Call | None:
    if not any(isinstance(sbp, Partial) for sbp in layout.sbp):
        return None
    value = Value(f"{node.value.name}.hinted", node.value.shape, node.value.dtype)
    return Call(HINT, (Ref(node.value.name),), (), (value,), hint=Hint(layout.sbp))


def _rename(node: Any, names: Mapping[str, str]) -> Any:
    def arg(leaf: Any) -> Any:
        if isinstance(leaf, tuple):
            return tuple(map(arg, leaf))
        return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    if not any(name in names for name in node_uses(node)):
        return node
    if isinstance(node, Output):
        return replace(node, value=arg(node.value))
    kwargs = tuple((key, arg(value)) for key, value in node.kwargs)
    return replace(node, args=arg(node.args), kwargs=kwargs)


torch.set_num_threads(1)
