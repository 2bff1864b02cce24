"""Random strategies as text, for a program whose parameters and leaves are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tools.random_programs.cases import Case
from weft.compiler.schedule.presets import PRESETS

Shapes = Mapping[str, tuple[int, ...]]
# Weights of layers whose inputs are made by a layer of columns.
ROWS = ("down", "out", "b", "two")
COLUMNS = ("up", "gate", "q", "k", "v", "qkv", "a", "one")


@dataclass(frozen=True)
class Known:
    """What a strategy may name.

    Attributes:
        parameters: shapes of parameters and buffers by name.
        linears: names of plain linear layers.
        leaves: shapes of the entries of a batch.
        children: names of the model's own modules and parameters, in order.
    """

    parameters: Shapes
    linears: Sequence[str]
    leaves: Shapes
    children: Sequence[str]


def strategy_text(case: Case, known: Known) -> str:
    """`STRATEGY = …` of a case."""
    rng = case.rng("strategy")
    text = _BASES[case.base](case, known, rng)
    more = [_feature(case, name, known) for name in case.features]
    given = ", ".join(each for each in more if each)
    return f"STRATEGY = replace({text}, {given})" if given else f"STRATEGY = {text}"


def _data(case: Case, known: Known, rng: random.Random) -> str:
    return "weft.data_parallel()"


def _free(case: Case, known: Known, rng: random.Random) -> str:
    """Everything is deduced, or everything but the batch."""
    return rng.choice(["weft.Strategy()", 'weft.Strategy(batch={"*": split(0)})'])


def _tensor(case: Case, known: Known, rng: random.Random) -> str:
    """Layers by columns and rows as they are meant, or at random; experts by their hidden width."""
    columns, rows = _columns_and_rows(known, rng)
    sequence = ", sequence=1" if len(case.shape) == 2 and rng.random() < 0.3 else ""
    experts = _experts(known)
    if not columns and not rows and not experts:
        return _random(case, known, rng)
    text = f"weft.tensor_parallel({columns}, {rows}{sequence})"
    if not experts or rng.random() < 0.4:
        return text
    laid = ", ".join(f'"{name}": {_inside(name, known)}' for name in experts)
    return f"replace({text}, parameters={{{laid}}})"


def _hybrid(case: Case, known: Known, rng: random.Random) -> str:
    columns, rows = _columns_and_rows(known, rng)
    sequence = ", sequence=1" if len(case.shape) == 2 and rng.random() < 0.2 else ""
    experts = _experts(known)
    if experts and rng.random() < 0.7:
        outer = rng.choice(["broadcast", "split(0)"])
        laid = {name: f"({outer}, {_inside(name, known)})" for name in experts}
        if rng.random() < 0.4:
            laid = dict.fromkeys(experts, "(broadcast, split(0))")
        parts = ", ".join(f'"{name}": {sbp}' for name, sbp in laid.items())
        batch = rng.choice(["(split(0), broadcast)", "split(0)"])
        return f'weft.Strategy(batch={{"*": {batch}}}, parameters={{{parts}, "*": broadcast}})'
    return f"weft.hybrid_parallel({columns}, {rows}{sequence})"


def _random(case: Case, known: Known, rng: random.Random) -> str:
    """Some parameters, buffers and leaves in any layout."""
    leaves = {
        name: _sbp(case, shape, rng) for name, shape in known.leaves.items() if rng.random() < 0.6
    }
    return _laid(leaves, _random_parameters(case, known, rng))


def _random_data(case: Case, known: Known, rng: random.Random) -> str:
    """The batch split along the first axis, some parameters in any layout."""
    batch = (
        "split(0)"
        if len(case.grid) == 1 or "own stages" in case.features
        else _tuple(["split(0)", *["broadcast"] * (len(case.grid) - 1)])
    )
    return _laid({"*": batch}, _random_parameters(case, known, rng))


def _expert(case: Case, known: Known, rng: random.Random) -> str:
    experts = _experts(known)
    if not experts:
        return _random_data(case, known, rng)
    biases = [name for name in known.parameters if name.endswith("_bias")]
    if rng.random() < 0.2:
        laid = ", ".join(f'"{name}": split(0)' for name in experts)
        return f'weft.Strategy(batch={{"*": broadcast}}, parameters={{{laid}, "*": broadcast}})'
    capacity = rng.choice(["", "", ", capacity=8.0"])
    return f"weft.expert_parallel({experts + biases * (rng.random() < 0.5)}{capacity})"


def _context(case: Case, known: Known, rng: random.Random) -> str:
    whole = [name for name, shape in known.leaves.items() if len(shape) < 2]
    data = len(case.grid) == 2 and rng.random() < 0.7
    if len(case.grid) == 1 or data:
        return f"weft.context_parallel(1, data={data}, whole={whole})"
    leaves = {name: f"split({int(name not in whole)})" for name in known.leaves}
    return _laid(leaves, {"*": "broadcast"})


_BASES: Mapping[str, Callable[[Case, Known, random.Random], str]] = {
    "data": _data,
    "free": _free,
    "tensor": _tensor,
    "hybrid": _hybrid,
    "random": _random,
    "random data": _random_data,
    "expert": _expert,
    "context": _context,
}


def _columns_and_rows(known: Known, rng: random.Random) -> tuple[list[str], list[str]]:
    columns: list[str] = []
    rows: list[str] = []
    wild = rng.random() < 0.3
    for name in known.linears:
        kind, chance = name.split(".")[-1], rng.random()
        if kind in ROWS if not wild else chance < 0.3:
            rows.append(name)
        elif (not wild and kind in COLUMNS) or chance < (0.7 if wild else 0.5):
            columns.append(name)
    return columns, rows


def _experts(known: Known) -> list[str]:
    return [
        name
        for name, shape in known.parameters.items()
        if len(shape) == 3 and name.split(".")[-1] in ("up", "down")
    ]


def _inside(name: str, known: Known) -> str:
    """The split of an expert's hidden width, whichever way its matrices lie."""
    up = name.rsplit(".", 1)[0] + ".up"
    down = name.rsplit(".", 1)[0] + ".down"
    _, a, b = known.parameters[up]
    hidden = set(known.parameters[down][1:])
    turned = b in hidden and a not in hidden
    return f"split({1 if (name == up) == turned else 2})"


def _random_parameters(case: Case, known: Known, rng: random.Random) -> dict[str, str]:
    chance = rng.choice([0.2, 0.5, 0.9])
    return {
        name: _sbp(case, shape, rng)
        for name, shape in known.parameters.items()
        if rng.random() < chance
    }


def _sbp(case: Case, shape: tuple[int, ...], rng: random.Random) -> str:
    axes = 1 if "own stages" in case.features else len(case.grid)

    def one() -> str:
        return (
            f"split({rng.randrange(len(shape))})" if shape and rng.random() < 0.65 else "broadcast"
        )

    return one() if axes == 1 else _tuple([one() for _ in range(axes)])


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)"


def _laid(batch: Mapping[str, str], parameters: Mapping[str, str]) -> str:
    def text(laid: Mapping[str, str]) -> str:
        return "{" + ", ".join(f'"{name}": {sbp}' for name, sbp in laid.items()) + "}"

    return f"weft.Strategy(batch={text(batch)}, parameters={text(parameters)})"


def _feature(case: Case, name: str, known: Known) -> str:
    """A field of the strategy."""
    rng = case.rng("feature", name)
    blocks = [each for each in known.children if each.startswith("b")]
    some = [each for each in blocks if rng.random() < 0.6]
    match name:
        case "zero":
            axis = 0 if "own stages" in case.features else rng.randrange(len(case.grid))
            return f"zero=weft.Zero({rng.choice([1, 2, 3, 3])}, {axis})"
        case "micro":
            counts = [m for m in (2, 3, 4) if all(step.samples % m == 0 for step in case.steps)]
            return f"micro_batches={rng.choice(counts)}" if counts else ""
        case "recompute" | "offload":
            return f"{name}={some}" if some else ""
        case "stages":
            named = sorted(each for each, row in PRESETS.items() if not row.takes_turns)
            schedules = ["", "", *(f', schedule="{each}"' for each in named)]
            return f"stages={rng.choice([2, 2, 3])}{rng.choice(schedules)}"
        case "own stages":
            return f"stages={_stages(case, known.children, rng)}"
        case "clip":
            return f"clip_norm={rng.choice([0.01, 0.5, 100.0])}"
        case "activations" if some and not case.features.count("own stages"):
            sbp = rng.choice(["split(0)", "split(-1)", "broadcast", "split(1)"])
            sbps = (
                sbp if len(case.grid) == 1 else _tuple(["split(0)", *[sbp] * (len(case.grid) - 1)])
            )
            return f'activations={{"{rng.choice(some)}": {sbps}}}'
        case "bf16":
            return rng.choice(
                [
                    'precision="bf16"',
                    'precision=weft.Precision("bf16", reduce="fp32")',
                    'precision=weft.Precision("bf16", reduce="bf16", activations="fp32")',
                ]
            )
    return ""


def _stages(case: Case, children: Sequence[str], rng: random.Random) -> str:
    """Runs of modules, on ranks of their own."""
    count = min(rng.choice([2, 2, 3]), len(children), prod(case.grid))
    cuts = [0, *sorted(rng.sample(range(1, len(children)), count - 1)), len(children)]
    ranks = [0, *sorted(rng.sample(range(1, case.ranks), count - 1)), case.ranks]
    parts = []
    for at in range(count):
        names, on = children[cuts[at] : cuts[at + 1]], list(range(ranks[at], ranks[at + 1]))
        parts.append(f'weft.Stage({list(names)}, weft.placement("cpu", {on}))')
    return f"[{', '.join(parts)}]"
