"""Check manifests of Kubernetes against the published schemas.

    python recipes/checks/check_manifests.py recipes/kubernetes/*.yaml

Objects of Kubernetes itself by the JSON schemas of `kubernetes-validate`, those of Kubeflow Trainer and JobSet by the
models of `kubeflow-trainer-api`, which are made of their OpenAPI documents. The models pass over what they do not know,
so an object must come out as it went in.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models
import kubernetes_validate
import yaml

VERSION = "1.34"
# The model of each kind; that of a JobSet has its specification alone.
MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def unknown(given: Any, known: Any, where: str = "") -> list[str]:
    """Places of what is given that a model has not taken."""
    if isinstance(given, dict):
        known = known if isinstance(known, dict) else {}
        return [
            place
            for name, value in given.items()
            for place in (
                unknown(value, known[name], f"{where}.{name}")
                if name in known
                else [f"{where}.{name}"]
            )
        ]
    if isinstance(given, list):
        if not isinstance(known, list) or len(known) != len(given):
            return [where]
        each = enumerate(zip(given, known, strict=True))
        return [place for n, (a, b) in each for place in unknown(a, b, f"{where}[{n}]")]
    return [] if given == known else [f"{where}: {given!r} became {known!r}"]


def complaints(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with one object."""
    kind = manifest["kind"]
    if kind in MODELS:
        return unknown(manifest, MODELS[kind].from_dict(manifest).to_dict())
    if kind == "JobSet":
        spec = manifest["spec"]
        own = manifest.keys() - {"apiVersion", "kind", "metadata", "spec"}
        made = models.JobsetV1alpha2JobSetSpec.from_dict(spec)
        return [*sorted(own), *unknown(spec, made.to_dict(), "spec")]
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    return []


def main() -> int:
    kinds, found = [], []
    for path in map(Path, sys.argv[1:]):
        for manifest in yaml.safe_load_all(path.read_text()):
            kinds.append(manifest["kind"])
            found += [f"{path}: {manifest['kind']}: {line}" for line in complaints(manifest)]
    print("\n".join(found) or f"{', '.join(kinds)} fit their schemas")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
