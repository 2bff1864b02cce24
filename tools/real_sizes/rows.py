"""The table of what is planned: family, size, ranks and strategy of each row."""

from __future__ import annotations

from dataclasses import dataclass

from tools.real_sizes.decoders import DECODERS
from tools.real_sizes.encoders import ENCODERS
from tools.real_sizes.family import Family, Shape
from tools.real_sizes.language import LANGUAGE
from tools.real_sizes.nets import NETS
from tools.real_sizes.plans import KINDS, Kind
from tools.real_sizes.textbook import Grid

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*LANGUAGE, *DECODERS, *ENCODERS, *NETS)
}


@dataclass(frozen=True)
class Row:
    """A plan to make.

    Attributes:
        family: name of it.
        shape: size of model and batch.
        kind: name of the strategy.
        grid: of the ranks; of a pipeline, stages and ranks of each.
    """

    family: str
    shape: Shape
    kind: str
    grid: Grid

    @property
    def of_kind(self) -> Kind:
        """The strategy."""
        return KINDS[self.kind]

    @property
    def name(self) -> str:
        """As it is printed and chosen by."""
        size = f"{self.shape.layers} layers, {self.shape.sequences} × {self.shape.tokens}, {self.shape.precision}"
        return f"{self.family}, {size}: {self.kind} on {'×'.join(map(str, self.grid))}"


def rows_of(family: str, shape: Shape, kinds: dict[str, Grid]) -> list[Row]:
    """Rows that share a capture."""
    return [Row(family, shape, kind, grid) for kind, grid in kinds.items()]


# How many layers are planned where the published number is cut, and in pipelines of four stages.
LAYERS, STAGED = 4, 12

_DATA: dict[str, Grid] = dict.fromkeys(("data", "ZeRO 1", "ZeRO 2", "ZeRO 3", "deduced"), (8,))
_PIPELINES: dict[str, Grid] = {"pipeline": (4, 2), "pipeline + ZeRO 1": (4, 2)}
_TOKENS = {
    "GPT-2 XL": 1024,
    "BERT-large": 512,
    "T5-3B": 512,
    "Whisper large-v3": 448,
    "BART-large": 1024,
    "DeBERTa-v3-large": 512,
}
_WITHOUT = ("ViT-L/16", "DiT-XL/2", "ResNet-50", "DLRM")
# More ranks, longer sequences, other precisions and full depth, for these.
_WIDE = ("Llama 3 8B", "Qwen2 7B", "GPT-NeoX 20B", "Phi-3 mini", "Mixtral 8x7B", "BERT-large")
_LONG = ("Llama 3 8B", "Qwen3 8B", "Mistral 7B")
_HALF = ("Llama 3 8B", "Llama 3 70B", "Qwen2 7B", "GPT-2 XL", "Mixtral 8x7B", "ViT-L/16")
_DEEP = ("GPT-2 XL", "Llama 3 8B", "ViT-L/16")


def tokens_of(family: str) -> int:
    """Positions of a sequence: as the family was trained, or 2048 where it takes any."""
    return 1 if family in _WITHOUT else _TOKENS.get(family, 2048)


def layers_of(family: str) -> int:
    """Layers that are planned."""
    return FAMILIES[family].layers if family in ("ResNet-50", "DLRM") else LAYERS


def _tensors(family: Family) -> dict[str, Grid]:
    if not family.columns or family.tensor < 2:
        return {}
    t = family.tensor
    found: dict[str, Grid] = {"tensor": (t,), "hybrid": (2, t)}
    if family.sequence:
        found |= {"tensor + sequence": (t,), "hybrid + sequence": (2, t)}
    return found


def _kinds(family: Family) -> dict[str, Grid]:
    """The strategies that make sense for a family, on some 8 ranks."""
    found = {**_DATA, **_tensors(family)}
    if family.blocks:
        found["recompute"] = (8,)
    if family.experts:
        found["experts"] = (8,)
    if family.lookups:
        found["tables"] = (8,)
    return found


def _on(ranks: int, *kinds: str) -> dict[str, Grid]:
    return dict.fromkeys(kinds, (ranks,))


def family_rows(name: str) -> list[Row]:
    """Every row of a family, captures together."""
    tokens, layers = tokens_of(name), layers_of(name)
    sequences = 16384 if name == "DLRM" else 32
    found = rows_of(name, Shape(layers, tokens, sequences), _kinds(FAMILIES[name]))
    if FAMILIES[name].blocks:
        staged = min(STAGED, FAMILIES[name].layers) if layers == LAYERS else layers
        found += rows_of(name, Shape(staged, tokens, 32), _PIPELINES)
    if name in _HALF:
        for precision in ("bf16", "pure bf16"):
            kinds = _on(8, "data", "ZeRO 1", "ZeRO 3", "deduced")
            found += rows_of(name, Shape(layers, tokens, 32, precision), kinds)
    if name in _WIDE:
        plain = _on(64, "data", "ZeRO 1", "ZeRO 3", "deduced")
        hybrid = _tensors(FAMILIES[name])
        grids = {kind: (64 // grid[1], grid[1]) for kind, grid in hybrid.items() if len(grid) > 1}
        found += rows_of(name, Shape(layers, tokens, 256), {**plain, **grids})
        found += rows_of(name, Shape(layers, tokens, 2048), _on(512, "data", "ZeRO 1", "ZeRO 3"))
    if name in _LONG:
        kinds = {**_on(8, "data", "ZeRO 1", "ZeRO 3"), **_tensors(FAMILIES[name])}
        found += rows_of(name, Shape(2, 32768, 8), kinds)
    if name in _DEEP:
        found += rows_of(name, Shape(FAMILIES[name].layers, tokens, 32), _on(8, "data", "ZeRO 3"))
    return found


def all_rows() -> list[Row]:
    """Every row."""
    return [row for name in FAMILIES for row in family_rows(name)]


def short_rows() -> list[Row]:
    """A few of every kind, for the test suite: few layers, so that all are planned in a minute."""
    found = rows_of("GPT-2 XL", Shape(2, 1024, 32), _on(8, "data", "ZeRO 1", "ZeRO 3", "recompute"))
    found += rows_of("GPT-2 XL", Shape(4, 1024, 32), {"pipeline + ZeRO 1": (4, 2)})
    kinds = _on(8, "data", "ZeRO 1", "ZeRO 3", "deduced", "tensor", "tensor + sequence")
    found += rows_of("Llama 3 8B", Shape(2, 2048, 32), {**kinds, "hybrid + sequence": (2, 4)})
    return found + rows_of("DLRM", Shape(1, 1, 16384), {"tables": (8,)})
