"""Run every example with each of its strategies on two ranks, and the notebooks; say how long each took.

    python examples/run_all.py
    python examples/run_all.py vit gan --reports runs/gallery

A line for each run; the exit code is 1 where one of them has failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
# The strategies of each, in the order in which the gallery shows them.
STRATEGIES = {
    "gpt": ("hybrid", "data"),
    "llama": ("tensor", "pipeline"),
    "vit": ("data", "tensor"),
    "resnet": ("data", "space"),
    "bert": ("zero", "pipeline"),
    "lora": ("data", "tensor"),
    "moe": ("experts", "zero"),
    "dlrm": ("rows", "columns"),
    "gan": ("data", "apart"),
    "diffusion": ("data", "pipeline"),
    "speech": ("data", "pipeline"),
}
NOTEBOOKS = ("first_steps", "strategies")
# Seconds after which a run has failed.
LIMIT = 300


def commands(names: list[str], reports: Path | None) -> Iterator[tuple[str, str, list[str]]]:
    """Name, strategy and command line of each run."""
    for name, strategies in STRATEGIES.items():
        for strategy in strategies if name in names else ():
            script = [str(FOLDER / f"{name}.py"), "--strategy", strategy, "--check"]
            script += ["--steps", "10"] if name == "gpt" else []
            script += ["--report", f"{reports}/{name}-{strategy}.html"] if reports else []
            yield name, strategy, ["-m", "weft", "run", "-n", "2", *script]
    for name in NOTEBOOKS:
        if name in names:
            yield name, "", [str(FOLDER / "notebooks.py"), str(FOLDER / f"{name}.ipynb")]


def run(command: list[str]) -> tuple[str, bool]:
    """What a command writes, and whether it ended well."""
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        return f"{error.output or ''}\nno end after {LIMIT} s", False
    return ended.stdout.strip(), ended.returncode == 0


def told(output: str) -> str:
    """The last line on losses, and what stands below it."""
    lines = output.splitlines()
    losses = [place for place, line in enumerate(lines) if line.startswith("loss")]
    return "; ".join(lines[losses[-1] :] if losses else lines[-1:])


def main() -> int:
    every = [*STRATEGIES, *NOTEBOOKS]
    parser = argparse.ArgumentParser(description="Run the examples.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(every)}")
    parser.add_argument("--reports", type=Path, help="a folder for a report of each run")
    asked = parser.parse_args()
    unknown = sorted({*asked.names} - {*every})
    if unknown:
        parser.error(f"there is no example {', '.join(unknown)}; there are {', '.join(every)}")
    failed = 0
    for name, strategy, command in commands(asked.names or every, asked.reports):
        begin = time.perf_counter()
        output, well = run(command)
        seconds = time.perf_counter() - begin
        print(
            f"{name:12} {strategy:9} {seconds:6.1f} s  {told(output) if well else 'FAILED'}",
            flush=True,
        )
        if not well:
            print(output, flush=True)
            failed += 1
    print(f"{failed} failed" if failed else "all ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
