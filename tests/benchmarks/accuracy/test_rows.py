from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.accuracy.__main__ import told_rows
from benchmarks.accuracy.decoder import Form
from benchmarks.accuracy.row import Residual, Row
from benchmarks.accuracy.rows import read_rows

VTRAIN = (
    "Parameters (billion),# GPUs,global batch,micro batch,hidden size,attention heads,# layers,"
    "sequence length,tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
    "3.6,64,512,4,3072,32,30,2048,2,16,2,4078.2\n"
)
COMMON = {
    **dict.fromkeys(
        [
            "cp",
            "ep",
            "vpp",
            "sharding",
            "seq_parallel",
            "pp_schedule",
            "step_time_s",
            "samples_per_s",
        ],
        "",
    ),
    "row_id": "a",
    "group": "g",
    "framework": "f",
    "arch": "gpt",
    "model": "m",
    "layers": "6",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "",
    "ffn_hidden": "",
    "vocab": "1000",
    "seq_len": "32",
    "tied_emb": "",
    "hardware": "A100 80GB",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "interconnect": "",
    "precision": "bf16",
    "dp": "2",
    "tp": "2",
    "pp": "4",
    "zero_stage": "1",
    "recompute": "full",
    "micro_batch": "2",
    "grad_acc": "8",
    "global_batch": "32",
    "mem_gb": "1.5",
    "mem_kind": "GiB",
    "status": "ok",
    "step_time_s_derived": "3.5",
}


def written(folder: Path, name: str, **changes: str) -> Path:
    told = {**COMMON, **changes}
    path = folder / name
    path.write_text(",".join(told) + "\n" + ",".join(told.values()) + "\n")
    return path


def test_vtrain_rows(tmp_path: Path) -> None:
    path = tmp_path / "vtrain_multi.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(VTRAIN)
    (row,) = read_rows(path)
    assert not isinstance(row, str)
    assert (row.data, row.tensor, row.pipeline, row.micro_batches) == (16, 2, 2, 8)
    assert (row.layers, row.devices, row.topology) == (30, 64, "a100-80gb")
    assert row.seconds == pytest.approx(4.0782)


def test_rows_of_the_common_columns(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, "papers_megatron.csv"))
    assert not isinstance(row, str)
    assert isinstance(row.form, Form)
    assert (row.form.dropout, row.form.fused) == (True, False)
    assert row.form.vocabulary == 1024
    assert (row.micro_batches, row.zero, row.dtype, row.recompute) == (8, 1, "bfloat16", "full")
    assert row.memory == 1.5 * 2**30
    assert row.topology == "a100-80gb"


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("arch", "mt5", "arch 'mt5'"),
        ("arch", "moe", "arch 'moe'"),
        ("arch", "cnn", "the widths of model 'm' are not told"),
        ("arch", "cnn C64 W2", "a convolutional model in parts"),
        ("status", "projected", "status 'projected'"),
        ("status", "not reported (OOM likely)", "status 'not reported (OOM likely)'"),
        ("dp", "3", "dp × tp × pp = 24 of 16 devices"),
        ("ep", "2", "expert parallel: ep = 2"),
        ("cp", "2", "split sequences: cp = 2"),
        ("precision", "NVFP4", "precision NVFP4"),
        ("sharding", "HSDP", "parameters split inside nodes only"),
        ("pp_schedule", "ZB-2p", "schedule ZB-2p"),
        (
            "hardware",
            "TPU v4",
            "nothing in topologies of sources.yaml fits 'papers_megatron: TPU v4",
        ),
        ("layers", "", "layers is not told"),
        ("layers", "3", "3 layers in 4 stages"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(
    tmp_path: Path, column: str, value: str, reason: str
) -> None:
    (row,) = read_rows(written(tmp_path, "papers_megatron.csv", **{column: value}))
    assert isinstance(row, str)
    assert reason in row


def read(folder: Path, **changes: str) -> Row:
    (row,) = read_rows(written(folder, "papers_megatron.csv", **changes))
    assert not isinstance(row, str), row
    return row


def test_figures_that_follow_from_others(tmp_path: Path) -> None:
    assert read(tmp_path, dp="").data == 2
    assert read(tmp_path, n_gpus="").data == 2
    assert read(tmp_path, grad_acc="").micro_batches == 8
    assert read(tmp_path, micro_batch="").sequences == 2
    # With a pipeline and neither told, a micro-batch is one sequence.
    both = read(tmp_path, micro_batch="", grad_acc="")
    assert (both.sequences, both.micro_batches) == (1, 16)
    told = read(tmp_path, step_time_s_derived="", samples_per_s="16")
    assert told.seconds == pytest.approx(2.0)


def test_heads_that_are_not_told_have_the_usual_size(tmp_path: Path) -> None:
    form = read(tmp_path, hidden="1024", heads="").form
    assert isinstance(form, Form)
    assert form.heads == 8


def test_precision_recompute_and_chunks(tmp_path: Path) -> None:
    half = read(tmp_path, precision="fp16", recompute="per recipe")
    assert (half.dtype, half.recompute) == ("float16", "")
    told = read(tmp_path, layers="8", vpp="2")
    assert (told.chunks, told.layers, told.schedule) == (2, 8, "interleaved")
    assert read(tmp_path, layers="16", vpp="layers per chunk 2").chunks == 2
    assert read(tmp_path, pp_schedule="ZB-1p").schedule == "zero_bubble"


def test_convolutional_models_and_mixtures(tmp_path: Path) -> None:
    alone = {"dp": "16", "tp": "1", "pp": "1"}
    wide = read(tmp_path, arch="cnn", group="intra_WideResNet50-C320-W2", **alone)
    assert wide.form == Residual(width=320, widening=2, classes=1024)
    plain = read(tmp_path, arch="cnn", model="ResNet50 v1.5", layers="", **alone)
    assert plain.form == Residual()
    mixed = read(tmp_path, arch="gpt-moe", experts="8", layers="8")
    assert isinstance(mixed.form, Form)
    assert mixed.form.experts == 8
    assert mixed.layers == 4  # blocks of two layers


def test_rows_out_of_memory_have_no_time(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, "papers_megatron.csv", status="OOM"))
    assert not isinstance(row, str)
    assert row.out_of_memory
    assert row.seconds is None


def test_rows_that_are_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    told = written(tmp_path, "papers_megatron.csv", dp="")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    left_out: Counter[tuple[str, str]] = Counter()
    paths = [told, written(tmp_path, "papers_other.csv", status="hang"), other]
    assert [row.data for row in told_rows(paths, left_out)] == [2]
    assert left_out == {
        ("papers_other", "status 'hang'"): 1,
        ("other", "all: unknown columns ['a', 'b']"): 1,
    }


def test_unknown_columns_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="unknown columns"):
        list(read_rows(path))
