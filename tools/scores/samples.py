"""A few rows of each page, found again: what is compared, and how far a row may be off before it counts as other.

Each function draws rows of a page's text and yields, as soon as a row is found again, its name and what is other now,
"" where it holds. Modules that take long to import are imported when a row is drawn.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Differences of rounding are other ones on other processors: so many times what the page has is no drift.
ROUNDING = 100.0
# A machine is never as idle as another: a speed beside a peer's is other when it is below this share of the page's.
SPEED = 0.5

# By which part cells of docs/real_sizes.md may be off: the bytes sent by rounding of the last digit, and the peak in
# bytes and beside data parallel's, of which plans count more from time to time. All other cells are exact.
NEAR = {5: 0.01, 6: 0.1, 11: 0.1}
# The head of the column of docs/benchmarks.md that has the time.
STEP = "ms a step (quartiles)"

Found = tuple[str, str]


def rows_of(text: str, columns: int) -> list[list[str]]:
    """The cells of all rows of tables with so many columns, without heads."""
    rows = [_cells(line) for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == columns]


def named_rows(text: str, *heads: str) -> Iterator[dict[str, str]]:
    """The rows of the tables that have columns of these names, each cell by the head of its column."""
    names: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            names = []
        elif not names:
            names = _cells(line)
        elif set(heads) <= set(names) and line.strip("|- :"):
            yield dict(zip(names, _cells(line), strict=True))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def ops(text: str, draw: random.Random) -> Iterator[Found]:
    """Whole lines of docs/ops.md are the same."""
    check, report, samples = _modules("tools.opinfo", "check", "report", "samples")
    infos = {samples.full_name(info): info for info in samples.opinfos()}
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    lines = [line for line in lines if line.count(" | ") == 7]
    for line in draw.sample(lines, len(lines)):
        name = line.split("`")[1]
        found = report.line(check.check_op(infos[name], check.Effort()))
        yield name, "" if found == line else f"{found}\n  not\n  {line}"


def eager_ops(text: str, draw: random.Random) -> Iterator[Found]:
    """An op that is not named among those that are not right is right."""
    eager, samples = _modules("tools.opinfo", "eager", "samples")
    infos = {samples.full_name(info): info for info in samples.opinfos(eager.DTYPES)}
    bad = {row[0].strip("`") for row in rows_of(text, 3)}
    names = [name for name in infos if name not in bad]
    for name in draw.sample(names, len(names)):
        report = eager.check_eager(infos[name], eager.EagerEffort())
        why = "; ".join([*report.wrong[:1], *report.refused][:2])
        yield f"{name} (eager)", "" if report.verdict == "right" else f"{report.verdict}: {why}"


def models(text: str, draw: random.Random) -> Iterator[Found]:
    """A cell of docs/models.md is equal still, and no more than `ROUNDING` times as far off."""
    if importlib.util.find_spec("transformers") is None:
        return  # it has no version for this Python
    (module,) = _modules("tools", "models")
    cases = module.cases()
    rows = module.rows_of(text)
    cells = [(name, i) for name, row in rows.items() for i in range(len(row))]
    for name, i in draw.sample(cells, len(cells)):
        column, before = module.columns()[i], rows[name][i]
        if before in (module.AS_DATA, module.LEFT_OUT):
            continue
        found = module.compare(name, cases[name], [column])[column]
        yield f"{name}, {column}", drift(found, before)


def combinations(text: str, draw: random.Random) -> Iterator[Found]:
    """A cell of docs/combinations.md is equal still, and no more than `ROUNDING` times as far off."""
    (module,) = _modules("tools", "combinations")
    every = list(module.combinations())
    cells = module.cells_of(text)
    for combination in draw.sample(every, len(every)):
        before = cells[combination]
        found = module.cell_of(combination, module.difference(combination))
        yield str(combination), drift(found, before)


def drift(found: str, before: str) -> str:
    """What is other in a cell of a difference; "" where nothing is."""
    if found.startswith("**"):
        return "" if before.startswith("**") else f"{found}, not {before}"
    if before.startswith("**"):
        return f"{found} is equal, the page has {before}"
    now, page = (float(cell.partition(" ")[0]) for cell in (found, before))
    return "" if now <= ROUNDING * max(page, 1e-16) else f"{found}, not {before}"


def real_sizes(text: str, draw: random.Random) -> Iterator[Found]:
    """Rows of docs/real_sizes.md are there again, below their family: all the same, but for memory, near it."""
    page, rows, run = _modules("tools.real_sizes", "page", "rows", "run")
    families = dict(part.split("\n", 1) for part in text.split("\n### ")[1:])
    every = list(rows.all_rows())
    for row in draw.sample(every, len(every)):
        # Samples of other pages leave another one behind.
        torch = importlib.import_module("torch")
        torch.set_default_dtype(torch.float32)
        (result,) = run.results([row])
        found = page.row_of(result)
        there = any(same_plan(found, line) for line in families[row.family].splitlines())
        yield row.name, "" if there else f"{found} is not on the page"


def same_plan(found: str, line: str) -> bool:
    """True where rows of real sizes say the same of one plan, each cell as far as `NEAR` says.

    What is not there, such as the cells of a plan that failed, is near nothing but itself.
    """
    cells, others = _cells(found), _cells(line)
    if len(cells) != len(others):
        return False
    pairs = zip(cells, others, strict=True)
    return all(_near(*pair, NEAR.get(i, 0.0)) for i, pair in enumerate(pairs))


def _near(one: str, other: str, part: float) -> bool:
    try:
        return one == other or abs(float(one) / float(other) - 1) <= part
    except (ValueError, ZeroDivisionError):
        return False


def programs(text: str, draw: random.Random) -> Iterator[Found]:
    """Programs from the seeds that docs/random_programs.md names: none is wrong, hangs or ends in an internal error."""
    cases, main, texts = _modules("tools.random_programs", "cases", "__main__", "text")
    column = "seeds from"
    seeds = [
        int(seed) for row in named_rows(text, column) for seed in re.findall(r"\d+", row[column])
    ]
    while True:
        seed = draw.choice(seeds) + draw.randrange(90)
        judges = main.Judge()
        verdict = judges(texts.case_text(cases.draw(seed)), f"<program {seed}>")
        judges.stop()
        bad = verdict.kind in main.BAD
        yield f"program {seed}", f"{verdict.kind}: {verdict.why[:200]}" if bad else ""


def benchmarks(text: str, draw: random.Random) -> Iterator[Found]:
    """The smallest works beside eager PyTorch: losses agree, and the speed is no less than `SPEED` of the page."""
    work = draw.choice(["mlp_small", "lstm"])
    page = faster_than_eager(text, work)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        options = ["--work", work, "--strategy", "single", "--systems", "eager", "weft"]
        few = ["--seconds", "4", "--least", "3", "--once", "--out", str(out)]
        _run("benchmarks.compare", *options, *few)
        rows = json.loads(out.read_text())["rows"]
    yield f"{work}/single", _slower(rows, page)


def faster_than_eager(text: str, work: str) -> float:
    """How many times as fast as eager PyTorch docs/benchmarks.md has weft on one device, by the medians of both.

    Its cell against the best peer may be of torch.compile, which this gate has no time for.
    """
    here = [row for row in named_rows(text, "system", STEP) if row["work"] == work]
    alone = {row["system"]: row[STEP] for row in here if row["strategy"] == "single"}
    eager, own = (float(alone[name].partition(" ")[0]) for name in ("eager", "weft"))
    return eager / own


def _slower(rows: Sequence[dict[str, Any]], page: float) -> str:
    eager, own = (next(row for row in rows if row["system"] == name) for name in ("eager", "weft"))
    if "error" in own:
        return f"failed: {own['error'][:300]}"
    if own["losses_agree"] is not None and own["losses_agree"] > 0.01:
        return f"losses differ by {own['losses_agree']:.0e} of the way they went"
    ratio = eager["seconds"] / own["seconds"]
    return "" if ratio >= SPEED * page else f"{ratio:.2f}× eager, not {page:.2f}×"


def search(text: str, draw: random.Random) -> Iterator[Found]:
    """The local search finds the least of all 144 strategies of two steps of RNNLM."""
    (truth,) = _modules("benchmarks.search", "truth")
    name, make = list(truth.STEPS.items())[1]
    topology, seed = draw.choice(truth.MACHINES), draw.randrange(1000)
    step = make().stored()
    evaluator, space = truth.evaluator_of(step, topology), truth.space_of(step)
    best, found = (
        truth.least(evaluator, space),
        truth.found_by(evaluator, seed, 400, space),
    )
    yield f"{name} on {topology}, seed {seed}", "" if found <= best else f"{found} s, not {best}"


def _modules(package: str, *names: str) -> list[Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made from configs
    warnings.simplefilter("ignore")
    return [importlib.import_module(f"{package}.{name}") for name in names]


def _run(module: str, *options: str) -> str:
    """What a module says as a program; raises `RuntimeError` with the end of it where it fails."""
    command = [sys.executable, "-m", module, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {(ended.stdout + ended.stderr)[-400:]}")
    return ended.stdout
