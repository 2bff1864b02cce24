"""What one micro-batch takes of a rank, per layer and at the ends: the works and exchanges of weft's own plans.

A decoder of one block and one of two are captured on the meta device and compiled for the ranks of one tensor-parallel
group, two micro-batches a step. The second's plan less the first's is a block, which is a layer (two in a mixture); the
rest belongs to the ends of the model. A convolutional model is one block. Nothing of it depends on a device: profiles
are kept in a file, and are priced for any kind.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import weft
from benchmarks.accuracy.decoder import Decoder, Form, token_loss
from benchmarks.accuracy.residual import Residual, ResidualNet, class_loss
from weft.compiler.options import options_of
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import split_parameters, strategy_hints
from weft.hardware.kinds.roofline import CallWork, work_of
from weft.ir.alias import value_bytes
from weft.ir.plan import Collective, Communicate, Compute, LocalCall, LocalProgram, LocalUpdate
from weft.units import Bytes, Flops

MICRO_BATCHES = 2
# Changes whenever profiles are made otherwise: older ones in a file are not read.
VERSION = 3
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FUSABLE = ("elementwise", "normalisation")


@dataclass(frozen=True)
class Setting:
    """What a profile depends on beside the number of layers.

    Attributes:
        form: of the model.
        tensor: ranks of a tensor-parallel group.
        sequences: of a micro-batch.
        recompute: "none", "selective" (attention without its matrices) or "full".
        sequence_parallel: norms and sums lie split along the sequence.
        dtype: of parameters and activations.
        compiled: element-wise calls run as one kernel with their only reader.
    """

    form: Form | Residual
    tensor: int = 1
    sequences: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    dtype: str = "float16"
    compiled: bool = False

    @property
    def key(self) -> str:
        """The text by which a file of profiles knows it."""
        return json.dumps([VERSION, asdict(self)], sort_keys=True)


Exchange = tuple[str, int]  # kind of collective, bytes of its largest side


@dataclass(frozen=True)
class Part:
    """What a part of the model does in one phase, for one micro-batch or once a step.

    Attributes:
        works: how often each work comes.
        exchanges: of the tensor-parallel group, how often each comes.
    """

    works: Counter[CallWork]
    exchanges: Counter[Exchange]


PHASES = ("forward", "backward", "once")


@dataclass(frozen=True)
class Profile:
    """A block, and the ends of the model together: embedding, last norm, last layer and loss.

    Attributes:
        layer, ends: by phase; `layer` is a block.
        layer_parameters, end_parameters: bytes of each parameter as it lies on a rank, by how many there are.
        kept: bytes that a layer keeps for the backward of a micro-batch.
        end_kept: what a rank holds at its peak beside layers and variables.
    """

    layer: Mapping[str, Part]
    ends: Mapping[str, Part]
    layer_parameters: Counter[int]
    end_parameters: Counter[int]
    kept: int
    end_kept: int


@dataclass(frozen=True)
class _Counted:
    phases: Mapping[str, Part]
    parameters: Counter[int]
    activations: int


def profile_of(setting: Setting) -> Profile:
    """The profile of a setting: two captures, and a compilation of each."""
    if isinstance(setting.form, Residual):
        whole = _counted(_compiled_residual(setting, setting.form), setting.compiled)
        nothing = {phase: Part(Counter(), Counter()) for phase in PHASES}
        return Profile(whole.phases, nothing, whole.parameters, Counter(), whole.activations, 0)
    form = setting.form
    one, two = (_counted(_compiled(setting, form, count), setting.compiled) for count in (1, 2))
    layer = {phase: _less(two.phases[phase], one.phases[phase]) for phase in PHASES}
    ends = {phase: _less(one.phases[phase], layer[phase]) for phase in PHASES}
    kept = max(0, two.activations - one.activations)
    parameters = two.parameters - one.parameters
    return Profile(
        layer,
        ends,
        parameters,
        one.parameters - parameters,
        kept,
        max(0, one.activations - kept),
    )


def _compiled(setting: Setting, form: Form, blocks: int) -> Compiled:
    with torch.device("meta"):
        model = Decoder(form, blocks).to(DTYPES[setting.dtype])
        ids = torch.empty(setting.sequences * MICRO_BATCHES, form.length, dtype=torch.int64)
    batch = {"x": ids, "y": ids}
    return _planned(setting, model, token_loss, batch, _strategy(setting, form))


def _compiled_residual(setting: Setting, sizes: Residual) -> Compiled:
    dtype = DTYPES[setting.dtype]
    count = setting.sequences * MICRO_BATCHES
    with torch.device("meta"):
        model = ResidualNet(sizes).to(dtype)
        images = torch.empty(count, 3, sizes.side, sizes.side, dtype=dtype)
        labels = torch.empty(count, dtype=torch.int64)
    again = ("body.*",) if setting.recompute == "full" else ()
    strategy = weft.Strategy(micro_batches=MICRO_BATCHES, recompute=again, **_masters(setting))
    return _planned(setting, model, class_loss, {"x": images, "y": labels}, strategy)


def _planned(
    setting: Setting, model: nn.Module, loss: Any, batch: dict[str, Tensor], strategy: weft.Strategy
) -> Compiled:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = weft.Step(model, loss, optimizer, batch)
    options = options_of(strategy)
    apart = split_parameters(strategy, dict(model.named_parameters()))
    captured = step.captured("cpu", options.precision, apart)
    placement = weft.placement("cpu", list(range(setting.tensor)))
    placements = stage_placements(options.stages, placement)
    hints = strategy_hints(strategy, captured.graph, placements)
    return compile_graph(captured.graph, hints, placement, (0,), options)


def _masters(setting: Setting) -> dict[str, Any]:
    return {"precision": None if setting.dtype == "float32" else weft.Precision(masters=True)}


def _strategy(setting: Setting, form: Form) -> weft.Strategy:
    again = setting.recompute
    columns = ["blocks.*.attention.qkv", "blocks.*.feed.up"]
    columns += ["blocks.*.feed.gate"] if form.llama else []
    columns += [] if form.tied else ["head"]
    rows = ["blocks.*.attention.proj", "blocks.*.feed.down"]
    laid = weft.tensor_parallel(columns, rows, 1 if setting.sequence_parallel else None)
    modules = {"none": (), "selective": ("blocks.*.attention.core",), "full": ("blocks.*",)}
    return replace(
        laid,
        parameters={**laid.parameters, "token.weight": weft.split(0)},
        micro_batches=MICRO_BATCHES,
        recompute=modules[again],
        **_masters(setting),
    )


def _counted(compiled: Compiled, fuses: bool) -> _Counted:
    plan, program = compiled.plan.ranks[0], compiled.programs[0]
    phases = {phase: Part(Counter(), Counter()) for phase in PHASES}
    parameters: Counter[int] = Counter()
    kind = "forward"
    for actor in plan.actors:
        if isinstance(actor, Compute):
            # With one stage the phases of exchanges are not told: that of the segment before them counts.
            kind = "backward" if actor.nodes[-1].phase.kind != "forward" else "forward"
            updates = (node for node in actor.nodes if isinstance(node, LocalUpdate))
            parameters.update(value_bytes(program.values[node.target]) for node in updates)
            _count_works(actor, program, phases, actor.acts == 1, fuses)
        elif isinstance(actor, Communicate):
            part = phases["once" if actor.acts == 1 else kind]
            part.exchanges.update(map(_exchange, actor.collectives))
    taken = compiled.peaks[0].memory
    return _Counted(phases, parameters, taken.activations)


def _exchange(node: Any) -> Exchange:
    assert isinstance(node, Collective)
    return node.kind, max(value_bytes(node.input), value_bytes(node.output))


def _count_works(
    actor: Compute, program: LocalProgram, phases: Mapping[str, Part], once: bool, fuses: bool
) -> None:
    calls = [node for node in actor.nodes if isinstance(node, LocalCall)]
    works = {id(node): work_of(node.first) for node in calls}
    if fuses:
        works = dict(_fused(actor, calls, works, program))
    for node in calls:
        work = works[id(node)]
        if work is not None:
            kind = "backward" if node.phase.kind == "weight" else node.phase.kind
            phases["once" if once else kind].works[work] += 1


def _fused(
    actor: Compute,
    calls: list[LocalCall],
    works: Mapping[int, CallWork | None],
    program: LocalProgram,
) -> Iterator[tuple[int, CallWork | None]]:
    """The works where an element-wise call goes into its only reader: its result is never written or read.

    Sums over rows take element-wise calls before them and behind them, as Inductor and hand-written kernels do.
    """
    readers: dict[str, list[LocalCall]] = {}
    for node in calls:
        for name in node.reads:
            readers.setdefault(name, []).append(node)
    found, kept = dict(works), set(actor.produces)
    for node in calls:
        work, made = found[id(node)], [value.name for value in node.makes]
        after = readers.get(made[0], []) if len(made) == 1 else []
        if work is None or work.op_class not in FUSABLE or len(after) != 1 or made[0] in kept:
            continue
        reader = found[id(after[0])]
        if reader is None or reader.op_class not in FUSABLE:
            continue
        if work.op_class == reader.op_class == "normalisation":
            continue
        size = value_bytes(program.values[made[0]])
        moved = Bytes(max(0, work.moved + reader.moved - 2 * size))
        cls = work.op_class if work.op_class == "normalisation" else reader.op_class
        flops = Flops(work.flops + reader.flops)
        joined = replace(reader, op_class=cls, moved=moved, flops=flops)
        found[id(node)], found[id(after[0])] = None, joined
    return iter(found.items())


def _less(more: Part, less: Part) -> Part:
    return Part(more.works - less.works, more.exchanges - less.exchanges)
