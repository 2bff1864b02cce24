"""What `python -m benchmarks` measures: pairs of work and strategy, and the systems that are worth the time."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.systems.table import SYSTEMS
from benchmarks.works.table import WORKS

# Systems that others of their kind beat in the runs until 2026-11-25, whose rows were not kept: DTensor as in
# the tutorial, without sequence parallel; compiled blocks under 1F1B, when the eager ZBV is a seventh faster;
# of tables, what gathers or reduces all of them.
BEATEN = {
    "tensor_parallel": {"dtensor", "dtensor compiled"},
    "pipeline": {"torch 1f1b compiled"},
    "split": {"ddp compiled", "fsdp2 compiled"},
    "expert": {"ddp compiled", "fsdp2 compiled"},
}
# The same for single pairs: 90 s to compile what is slower than eager DDP.
BEATEN_HERE = {"resnet50/data_parallel": {"ddp compiled", "limit compiled"}}
# The same over slow links; of the schedules the simplest and the best are enough.
BEATEN_SLOWLY = {"pipeline": {"torch interleaved", "torch zero bubble"}, "split": {"fsdp2"}}

# Where "auto" is measured: many small ops, where Inductor's kernels are faster, and one large work.
AUTO = {
    "mlp_small/single",
    "lstm/data_parallel",
    "lstm/single",
    "lstm_cells/single",
    "wide_deep/split",
    "split_softmax/split",
    "bert/data_parallel",
}

# Where weft runs over Gloo too, as its peers do: each strategy once, and where little is computed for a byte.
GLOO = {
    "mlp/data_parallel",
    "mlp/data_parallel/4ranks",
    "mlp3/data_parallel/3ranks",
    "gpt/data_parallel",
    "gpt/zero3",
    "gpt/tensor_parallel",
    "gpt8/pipeline",
    "wide_deep/split",
    "mixtral/expert",
}

# Words in the names of systems that differ from others by their kernels alone.
KERNELS = {"compiled", "auto", "kernels"}

# Seconds that a pair takes on 2 cores, about; 35 where nothing is said.
SECONDS = {
    "gpt": 150.0,
    "gpt8": 190.0,
    "bert": 140.0,
    "llama": 140.0,
    "resnet50": 100.0,
    "lstm_cells": 90.0,
}

QUICK = ("mlp_small/single", "lstm/single", "mlp/data_parallel", "split_softmax/split")


# Ranks of a pair where nothing else is said.
RANKS = 2


def name_of(work: str, strategy: str, link: str = "host", ranks: int = RANKS) -> str:
    """The name of a pair; of its link and its ranks only what is unusual."""
    unusual = [*([link] if link != "host" else []), *([f"{ranks}ranks"] if ranks > RANKS else [])]
    return "/".join([work, strategy, *unusual])


@dataclass(frozen=True)
class Pair:
    """A work with a strategy, by all systems, on this host or over slow links.

    Attributes:
        work: its name.
        strategy: its name.
        link: "host", or the rate of slow links.
        ranks: how many there are, but for "single".
    """

    work: str
    strategy: str
    link: str = "host"
    ranks: int = RANKS

    @property
    def name(self) -> str:
        return name_of(self.work, self.strategy, self.link, self.ranks)

    @property
    def seconds(self) -> float:
        """What it takes, about."""
        return SECONDS.get(self.work, 35.0)

    @property
    def systems(self) -> list[str]:
        """The names of the systems that are worth the time."""
        names = [each.name for each in SYSTEMS[self.strategy]]
        place = name_of(self.work, self.strategy, self.link)  # whatever the number of ranks
        left_out = BEATEN.get(self.strategy, set()) | BEATEN_HERE.get(place, set())
        if self.link != "host":  # bytes decide
            left_out |= BEATEN_SLOWLY.get(self.strategy, set())
            left_out |= {name for name in names if KERNELS & set(name.split())}
        if self.name not in AUTO:
            left_out |= {"weft auto", "limit weft auto"}
        if self.name not in GLOO:  # over slow links all systems run over Gloo
            left_out.add("weft over gloo")
        if not self.work.startswith("resnet"):  # nothing is normed over the batch
            left_out.add("ddp synced")
        return [name for name in names if name not in left_out]


SPLITS = (
    *(
        Pair(work, strategy)
        for work in ("gpt", "bert", "llama")
        for strategy in ("zero3", "tensor_parallel")
    ),
    Pair("gpt8", "pipeline"),
    *(Pair(work, "split") for work in ("wide_deep", "split_softmax")),
    Pair("mixtral", "expert"),
)
# Works that are not measured on one device: it would show what others show.
ONLY_SPLIT = ("gpt8", "bert", "llama_tied", "mixtral", "mlp3")
# More ranks than most machines that run this have cores: what they wait for one another is seen, not a gain.
MANY = (
    Pair("mlp3", "data_parallel", ranks=3),
    Pair("mlp", "data_parallel", ranks=4),
    *(Pair("gpt", strategy, ranks=4) for strategy in ("data_parallel", "zero3", "tensor_parallel")),
)
PAIRS = (
    *(Pair(work, "single") for work in WORKS if work not in ONLY_SPLIT),
    *(Pair(work, "data_parallel") for work in ("mlp", "lstm", "gpt", "bert", "llama", "resnet50")),
    Pair("llama_tied", "zero3"),
    *SPLITS,
    *MANY,
    *(Pair(work, "data_parallel", "1gbit") for work in ("gpt", "bert", "llama")),
    *(Pair(each.work, each.strategy, "1gbit") for each in SPLITS if each.work != "bert"),
)
