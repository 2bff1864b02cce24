"""What job files start, with stand-ins for the programs of a cluster: they write their arguments and variables down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.harness import RECIPES

ENTRY = RECIPES / "kubernetes" / "entry.sh"
START = RECIPES / "ssh" / "start.sh"
SBATCH = RECIPES / "slurm" / "train.sbatch"


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def ran(folder: Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with the programs of a folder before all others, and with these variables alone."""
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        [str(each) for each in command],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    program(tmp_path, "python", 'echo "python $*"')
    program(tmp_path, "getent", "exit 0")
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, "-n 1"),
        ({"NODES": "1", "RANKS": "8"}, "-n 8"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "cpu"}, "-n 1"),
        ({"PET_NPROC_PER_NODE": "auto"}, "-n 3"),
        (
            {"NODES": "2", "RANKS": "4", "MEETING": "gpt-node-0-0.gpt:1", "RUN": "gpt"},
            "-n 4 --nnodes 2 --rendezvous gpt-node-0-0.gpt:1 --run-id gpt",
        ),
        (
            {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "a.b"},
            "-n 1 --nnodes 2 --rendezvous a.b:29400 --run-id job",
        ),
    ],
)
def test_the_entry_point_starts_the_ranks_of_a_pod(
    variables: dict[str, str], options: str, programs: Path
) -> None:
    program(programs, "nvidia-smi", "printf 'a\\nb\\nc\\n'")
    found = ran(programs, ENTRY, "train.py", "--out", "a b", **variables)
    said = f"python -m weft run --grace 50 {options} train.py --out a b\n"
    assert found.stdout == said, found.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NODES": "two"}, "numbers from 1, found two and 1"),
        ({"NODES": "2"}, "2 nodes need a place to meet"),
    ],
)
def test_the_entry_point_says_what_is_missing(
    variables: dict[str, str], words: str, programs: Path
) -> None:
    found = ran(programs, ENTRY, "train.py", **variables)
    assert found.returncode == 2
    assert words in found.stderr
    assert not found.stdout


def test_each_host_is_started_and_given_the_secret_by_standard_input(programs: Path) -> None:
    # Runs on this host what it is to run on another one.
    program(programs, "ssh", 'host=$1; shift; echo "$host got: $*" >&2; exec sh -c "$*"')
    program(programs, "python", 'echo "$X $(printf %s "$WEFT_SECRET" | wc -c) $*"')
    found = ran(programs, START, "a root@b", "2", "train.py", "x y", EXPORT="X=1", MEETING="here")
    assert found.returncode == 0, found.stderr
    first, second = found.stdout.splitlines()
    assert first == second
    assert first.startswith(
        "1 64 -m weft run -n 2 --nnodes 2 --rendezvous here:29400 --run-id ssh-"
    )
    assert first.endswith(" train.py x y")
    assert sorted(line.split()[0] for line in found.stderr.splitlines()) == ["a", "root@b"]
    program(programs, "python", "echo $WEFT_SECRET")
    (secret,) = {*ran(programs, START, "a b", "1", "train.py").stdout.split()}
    assert len(secret) == 64
    program(programs, "python", "exit 3")
    assert ran(programs, START, "a b", "2", "train.py").returncode == 3


@pytest.mark.parametrize(
    ("code", "restarts", "queued"), [(0, 0, False), (3, 0, True), (3, 4, False)]
)
def test_slurm_queues_a_job_again_that_failed(
    code: int, restarts: int, queued: bool, programs: Path
) -> None:
    program(programs, "srun", f'echo "srun $*"; exit {code}')
    program(
        programs,
        "scontrol",
        """case $2 in
        hostnames) echo node7; echo node8 ;;
        node) echo "NodeName=$3 NodeAddr=10.0.0.7 NodeHostName=$3" ;;
        *) echo "scontrol $*" ;;
        esac""",
    )
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    again = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    found = ran(programs, SBATCH, "train.py", "--out", "x", RANKS="4", **job, **again)
    meet = f"--nnodes 2 --rendezvous 10.0.0.7:22345 --run-id 12345.{restarts}"
    lines = [f"srun python -m weft run -n 4 {meet} --grace 100 train.py --out x"]
    assert found.stdout.splitlines() == lines + ["scontrol requeue 12345"] * queued
    assert found.returncode == code


def manifest(name: str, kind: str) -> dict[str, Any]:
    every = yaml.safe_load_all((RECIPES / "kubernetes" / name).read_text())
    (found,) = [each for each in every if each["kind"] == kind]
    return found


def test_pods_of_a_jobset_meet_at_the_first_one() -> None:
    jobs = manifest("jobset.yaml", "JobSet")
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    name = jobs["metadata"]["name"]
    host, port = variables["MEETING"].split(":")
    assert host == f"{name}-{job['name']}-0-0.{name}"
    assert [each["containerPort"] for each in container["ports"]] == [int(port)]
    assert int(variables["NODES"]) == spec["completions"] == spec["parallelism"]
    assert jobs["spec"]["network"]["enableDNSHostnames"] is True


def test_manifests_name_what_is_there() -> None:
    claim = manifest("shared.yaml", "PersistentVolumeClaim")["metadata"]["name"]
    runtime, job = (manifest("trainjob.yaml", kind) for kind in ("TrainingRuntime", "TrainJob"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    for each in (runtime["spec"]["template"], manifest("jobset.yaml", "JobSet")):
        (pods,) = (
            x["template"]["spec"]["template"]["spec"] for x in each["spec"]["replicatedJobs"]
        )
        (volume,), (container,) = pods["volumes"], pods["containers"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim
        (mount,) = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        (secret,) = (x["valueFrom"]["secretKeyRef"] for x in container["env"] if "valueFrom" in x)
        assert secret == {"name": "weft-gpt", "key": "WEFT_SECRET"}
    script, _, out = job["spec"]["trainer"]["args"]
    assert (RECIPES.parent / script).is_file()
    assert out.startswith(mount["mountPath"])
