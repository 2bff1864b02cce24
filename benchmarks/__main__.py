"""All benchmarks, each in processes of its own: `python -m benchmarks`. Results: `runs/bench/*.json`."""

from __future__ import annotations

import os
import subprocess
import sys

COMMANDS = (
    ("-m", "benchmarks.overhead"),
    ("-m", "benchmarks.eager_overhead"),
    ("-m", "weft", "run", "-n", "2", "benchmarks/data_parallel.py"),
    ("-m", "weft", "run", "-n", "2", "benchmarks/pipeline.py"),
    ("-m", "weft", "run", "-n", "4", "benchmarks/pipeline.py"),
    ("-m", "weft", "run", "-n", "2", "benchmarks/zero.py"),
    ("-m", "benchmarks.memory_flat"),
    ("-m", "benchmarks.compile_time"),
)


def main() -> int:
    """Run every benchmark, one at a time; returns 1 when one of them did not run to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    codes = [
        subprocess.run([sys.executable, *command], env=environment).returncode
        for command in COMMANDS
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
