"""The source text of a case: a script that compares its program with plain PyTorch when it is run."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tools.random_programs.cases import Case
from tools.random_programs.losses import LOSSES, Loss
from tools.random_programs.optimizers import optimizer_text
from tools.random_programs.strategies import Known, strategy_text

HEAD = '''"""Random program {seed}: python -m tools.random_programs --only {seed}"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from tools.random_programs.grouped import grouped_product
from weft import broadcast, split

torch.set_default_dtype(torch.{dtype})
'''

VOCABULARY = 11


def program_text(case: Case) -> str:
    """All but the strategy."""
    blocks = list(case.written())
    parts = [HEAD.format(seed=case.seed, dtype=case.dtype)]
    for name, block in blocks:
        parts.append(_class(name.upper(), block.setup, "x", block.forward))
    parts.append(_model(case, [(name, block.auxiliary) for name, block in blocks]))
    loss = LOSSES[case.loss](case.rng("loss"), _made(case))
    optimizer = optimizer_text(case.optimizer, case.rng("optimizer"))
    if "complex128" in "".join(parts):  # of which PyTorch has no fused updates
        optimizer = optimizer.replace("fused=True", "foreach=False")
    parts += [_loss(case, loss), optimizer]
    draws = case.dropout > 0 and "ropout" in "".join(parts)
    parts += [_batch(case, loss), _settings(case, draws)]
    return "\n\n".join(parts)


def case_text(case: Case) -> str:
    """The whole script."""
    program = program_text(case)
    known = _known(namespace(program, f"<program {case.seed}>"))
    return f"""{program}
{strategy_text(case, known)}

if __name__ == "__main__":
    from tools.random_programs.judge import judge

    print(judge(globals()))
"""


def namespace(text: str, file: str) -> dict[str, Any]:
    """What a script defines. Its lines are there for errors that name them."""
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    found: dict[str, Any] = {"__name__": "random_program", "__file__": file}
    exec(compile(text, file, "exec"), found)
    return found


def _made(case: Case) -> tuple[int, ...]:
    """The shape of a sample that the model returns."""
    made = case.made()
    return (*made[:-1], VOCABULARY) if _is_tied(case) else made


def _is_tied(case: Case) -> bool:
    return case.tied and case.made()[-1] == case.shape[-1]


def _class(name: str, setup: str, arguments: str, forward: str) -> str:
    def body(lines: str) -> str:
        lines = textwrap.dedent(" " * 8 + lines.lstrip("\n ")) if lines.strip() else "pass"
        return textwrap.indent(lines.strip("\n"), " " * 8)

    return f"""class {name}(nn.Module):
    def __init__(self):
        super().__init__()
{body(setup)}

    def forward(self, {arguments}):
{body(forward)}
"""


def _model(case: Case, blocks: list[tuple[str, bool]]) -> str:
    setup, forward = [], []
    if case.start == "ids":
        setup.append(f"self.embedding = nn.Embedding({VOCABULARY}, {case.shape[-1]})")
        forward.append("x = self.embedding(x)")
    elif case.start == "images" or case.rng("stem").random() < 0.4:
        setup.append(f"self.gain = nn.Parameter(torch.rand({case.shape[-1]}) + 0.5)")
        forward.append("x = x * self.gain")
    else:
        setup.append(f"self.stem = nn.Linear({case.shape[-1]}, {case.shape[-1]})")
        forward.append("x = self.stem(x)")
    forward.append("more = 0.0")
    for name, auxiliary in blocks:
        setup.append(f"self.{name} = {name.upper()}()")
        if auxiliary:
            forward += [f"x, loss = self.{name}(x)", "more = more + loss"]
        else:
            forward.append(f"x = self.{name}(x)")
    if _is_tied(case):
        forward.append("x = x @ self.embedding.weight.t()")
    forward.append("return x, more")
    glue = "\n" + " " * 8
    made = _class("Model", glue + glue.join(setup), "x", glue + glue.join(forward))
    return f"""{made}

def make_model():
    torch.manual_seed({case.seed})
    return Model()
"""


def _loss(case: Case, loss: Loss) -> str:
    form = case.rng("returned").choice(
        [
            "loss",
            "loss",
            "(loss, out)",
            '{"loss": loss, "out": out}',
            '{"loss": loss, "parts": [loss * 2, out.argmax(-1)], "note": "text"}',
            '{"loss": loss, "size": out.detach().square().mean((0,)), "count": (out > 0).sum()}',
        ]
    )
    return f"""def loss_fn(model, batch):
    out, more = model(batch["x"])
    {loss.lines}
    loss = loss + more
    return {form}
"""


def _batch(case: Case, loss: Loss) -> str:
    sizes = ", ".join(map(str, case.shape))
    x = f"torch.randn(n, {sizes}, generator=g)"
    if case.start == "ids":
        x = f"torch.randint({VOCABULARY}, (n, {case.shape[0]}), generator=g)"
    lines = [f'"x": {x},', *(f'"{key}": {value},' for key, value in loss.leaves.items())]
    body = "\n        ".join(lines)
    return f"""def make_batch(seed, n):
    g = torch.Generator().manual_seed(seed)
    return {{
        {body}
    }}
"""


def _settings(case: Case, draws: bool) -> str:
    steps = ", ".join(f"({s.samples}, {s.update}, {s.rate}, {s.change!r})" for s in case.steps)
    ranks = torch.arange(case.ranks).reshape(case.grid).tolist()
    limits = {"float64": "1e-9", "float32": "2e-4"}
    limit = "3e-2" if "bf16" in case.features else limits[case.dtype]
    return f"""# Samples of the batch, whether parameters are updated, by what learning rates are multiplied before,
# and what else is done (tools/random_programs/changes.py).
STEPS = [{steps}]
GRID = {ranks}
LIMIT = {limit}
RANDOM = {draws}
EVALUATES = {"evaluation" in case.features}
METRICS = {"metrics" in case.features}
"""


def _known(script: dict[str, Any]) -> Known:
    """Names and shapes."""
    model = script["make_model"]()
    batch = script["make_batch"](0, 2)
    named = [*model.named_parameters(), *model.named_buffers()]
    kept = set(model.state_dict())
    return Known(
        {name: tuple(tensor.shape) for name, tensor in named if name in kept},
        [name for name, module in model.named_modules() if type(module) is nn.Linear],
        {key: tuple(leaf.shape) for key, leaf in _batch_leaves("", batch)},
        list(_children(model)),
    )


def _batch_leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a batch, by the keys that weft has for them."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _batch_leaves(f"{key}.{name}" if key else name, part)
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _batch_leaves(f"{key}[{place}]", part)
    else:
        yield key, value


def _children(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(recurse=False))
    yield from (name for name, _ in model.named_children())
