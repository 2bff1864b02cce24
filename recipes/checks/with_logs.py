"""TensorBoard, Weights & Biases offline, Prometheus: what a run logs is read back by each one's own library."""

from __future__ import annotations

import json

from recipes.harness import TRAIN, Work, Wrong, compared


def logs(work: Work) -> str:
    """Two ranks, three logs."""
    python = work.python_with("logs")
    out = work.folder("logs")
    names = ("tensorboard", "wandb", "prometheus")
    start = [python, "-m", "weft", "run", "-n", "2", TRAIN, "--out", str(out), "--logs", *names]
    work.run(start, "logs")
    path = out / "read.json"
    work.run([python, "recipes/checks/read_logs.py", str(out), str(path)], "read-logs")
    found = json.loads(path.read_text())
    for name in names[:2]:
        compared([(step, loss) for step, loss in found[name]], work.expected)
    last = (len(work.expected), work.expected[-1])
    compared([(1, found["prometheus"]["weft_loss"])], [last[1]])
    if (found["prometheus"]["weft_step"], found["labels"]) != (last[0], {"run": "logs"}):
        raise Wrong(f"Prometheus reads {found['prometheus']} with {found['labels']}")
    return f"{work.losses(out)}, read back from {', '.join(names)}"
