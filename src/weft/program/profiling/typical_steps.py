"""General steps whose calls stand for those of other models: a decoder and an image model, in some widths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from weft.capture.optimizer_groups import optimizers_of
from weft.compiler.pipeline import Compiled
from weft.hardware.measured_costs import Measurements, Roofline
from weft.layout import Placement
from weft.ops import flops, has_rule, traffic
from weft.planning.machine import placement_on
from weft.planning.plans import plan_stored
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep
from weft.program.planning.step import Job
from weft.program.profiling.profiler import Patience, measured_costs
from weft.runtime.profiling.call_times import calls_in_order
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Seconds

# Width, heads, sequences a rank, their length and the vocabulary.
_DECODERS = ((64, 2, 4, 32, 256), (512, 8, 2, 256, 4096))
# Channels, images a rank and their sides.
_IMAGES = ((32, 8, 32),)


@final
class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n, length, width] to as many."""
        parts = self.joined(self.before(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        made: Tensor = self.down(torch.nn.functional.gelu(self.up(self.between(x))))
        return x + made


@final
class _Decoder(nn.Module):
    def __init__(self, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(_Block(width, heads), _Block(width, heads))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n, length] to logits [n, length, vocabulary]."""
        logits: Tensor = self.head(self.blocks(self.token(tokens)))
        return logits


def _token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def _image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def general_steps(ranks: int, device_type: str = "cpu") -> Iterator[StoredStep]:
    """The captured steps, with samples for so many ranks."""
    with torch.device("meta"):
        jobs = list(_jobs(ranks))
    for job in jobs:
        yield job.stored(device_type)


def general_optimizers() -> Sequence[torch.optim.Optimizer]:
    """The optimizers whose updates are measured: of each, the kernels that torch takes by default."""
    parameters = [nn.Parameter(torch.zeros(1))]
    return torch.optim.AdamW(parameters), torch.optim.SGD(parameters, 1e-2, momentum=0.9)


def _jobs(ranks: int) -> Iterator[Job]:
    for width, heads, count, length, vocabulary in _DECODERS:
        tokens = torch.zeros(count * ranks, length, dtype=torch.int64)
        model: nn.Module = _Decoder(width, heads, vocabulary)
        yield Job(model, _token_loss, _adamw(model), {"x": tokens, "y": tokens})
    for channels, count, side in _IMAGES:
        images = torch.zeros(count * ranks, channels, side, side)
        labels = torch.zeros(count * ranks, dtype=torch.int64)
        model = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * channels, 100),
        )
        yield Job(model, _image_loss, _adamw(model), {"x": images, "y": labels})


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


# For the general calls, each is measured for so long.
_PATIENCE = Patience(call=0.01, update=0.02)
# Operations and bytes from which on a call shows how fast a device is, and up to which it shows what any call takes.
_LARGE, _SMALL = 2**22, 2**12


def measured_machine(world: World, begun: Callable[[str], object] = lambda _: None) -> Measurements:
    """General calls, updates, exchanges and overheads, the same on all ranks, which must call it."""
    strategy = data_parallel()
    ranks = Placement(world.device_type, (world.size,), tuple(range(world.size)))
    with uncollected():
        compiled = [
            plan_stored(step, strategy, ranks, world.ranks)
            for step in general_steps(world.size, world.device_type)
        ]
    found = measured_costs(world, compiled, optimizers_of(general_optimizers()), _PATIENCE, begun)
    return replace(found, roofline=roofline(compiled, found))


def measured_job(
    world: World,
    job: Job,
    strategy: Strategy | None = None,
    begun: Callable[[str], object] = lambda _: None,
) -> Measurements:
    """The distinct calls of a job (data parallel without `strategy`), as `measured_machine`; the model is not run."""
    planned = data_parallel() if strategy is None else strategy
    placement = placement_on(world.device_type, world.size, planned)
    with uncollected():
        stored = job.stored(world.device_type, planned)
        compiled = plan_stored(stored, planned, placement, world.ranks)
    return measured_costs(world, [compiled], optimizers_of(job.optimizer), begun=begun)


def roofline(compiled: Iterable[Compiled], measured_costs: Measurements) -> Roofline | None:
    """The few figures of a device that measured calls show; None if there are none of each kind."""
    rates, moving, starts = list[float](), list[float](), list[float]()
    for one in dict.fromkeys(calls_in_order(each for c in compiled for each in c.programs)):
        sample = measured_costs.calls.get(one.text)
        if sample is None or not sample.seconds or not has_rule(one.call.op):
            continue
        work, moved = flops(one.call), traffic(one.call)
        if work > _LARGE and work > moved:
            rates.append(work / sample.seconds)
        elif moved > _LARGE:
            moving.append(moved / sample.seconds)
        elif max(work, moved) < _SMALL:
            starts.append(sample.seconds)
    if not (rates and moving and starts):
        return None
    return Roofline(median(rates), median(moving), Seconds(median(starts)))
