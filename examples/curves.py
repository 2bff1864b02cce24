"""Loss curves of two runs side by side: a progress bar while each trains, a table, and a JSON summary."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_model import Batch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """The losses of all steps of a run, and the tokens per second of its median step."""

    losses: list[float]
    tokens_per_second: float


def train(
    title: str, step: Callable[[Batch], Tensor], batches: Sequence[Batch], show: bool
) -> Curve:
    """Take one step with each batch, under a progress bar if `show`."""
    losses, seconds, tokens = [], [], batches[0]["x"].numel()
    columns = (*Progress.get_default_columns(), "{task.fields[now]}")
    with Progress(*columns, disable=not show) as bar:
        task = bar.add_task(title, total=len(batches), now="")
        for batch in batches:
            start = time.perf_counter()
            losses.append(float(step(batch)))
            seconds.append(time.perf_counter() - start)
            now = f"loss {losses[-1]:.3f}, {tokens / seconds[-1]:,.0f} tokens/s"
            bar.update(task, advance=1, now=now)
    return Curve(losses, tokens / statistics.median(seconds))


def compare(
    found: Curve, plain: Curve, ranks: int, threads: int, strategy: str, folder: Path
) -> float:
    """Print both curves step by step and write `folder/summary.json`; plain PyTorch had so many threads.

    Returns how far the losses are apart at most, as a part of themselves.
    """
    pairs = list(zip(found.losses, plain.losses))
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
    speeds = [f"{curve.tokens_per_second:,.0f}" for curve in (found, plain)]
    plainly = f"loss, plain PyTorch, threads: {threads}"
    table = Table("step", f"loss, ranks: {ranks}", plainly, "relative difference")
    for step, (pair, difference) in enumerate(zip(pairs, differences)):
        table.add_row(str(step), *(f"{loss:.6f}" for loss in pair), f"{difference:.1e}")
    table.add_section()
    table.add_row("tokens/s", *speeds, f"at most {max(differences):.1e}")
    Console().print(table)
    summary = {
        "ranks": ranks,
        "single_device_threads": threads,
        "strategy": strategy,
        "losses": found.losses,
        "single_device_losses": plain.losses,
        "max_relative_difference": max(differences),
        "tokens_per_second": found.tokens_per_second,
        "single_device_tokens_per_second": plain.tokens_per_second,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    return max(differences)
