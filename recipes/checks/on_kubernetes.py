"""Kubernetes: the manifests against the published schemas, and the container's entry point on two hosts."""

from __future__ import annotations

import secrets

from recipes.checks.on_hosts import PORT, hosts
from recipes.harness import RECIPES, TRAIN, Work

ENTRY = "recipes/kubernetes/entry.sh"


def manifests(work: Work) -> str:
    """Every field of every manifest is one of the published models, with a value of its type."""
    python = work.python_with("kubernetes")
    files = sorted(str(path) for path in (RECIPES / "kubernetes").glob("*.yaml"))
    return work.run([python, "recipes/checks/check_manifests.py", *files], "manifests").strip()


def entry(work: Work) -> str:
    """The entry point with the variables of a JobSet on one host, and with those of Kubeflow Trainer on the other."""
    out = work.folder("kubernetes")
    common = {"PYTHON": work.python, "WEFT_SECRET": secrets.token_hex(32)}
    with hosts(2) as links:
        meeting = links.addresses[0]
        pods = (
            {"NODES": "2", "RANKS": "1", "MEETING": f"{meeting}:{PORT}"},
            {
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "1",
                "PET_MASTER_ADDR": meeting,
                "PET_MASTER_PORT": str(PORT),
            },
        )
        commands = []
        for host, variables in enumerate(pods):
            given = [f"{name}={value}" for name, value in variables.items()]
            commands.append(links.command(host, ["env", *given, ENTRY, TRAIN, "--out", str(out)]))
        work.together(commands, "kubernetes", variables=common)
    return work.losses(out)
