"""Rows in the columns of most files of published measurements, and their models, by the tables of `sources.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.decoder import Form
from benchmarks.accuracy.row import Residual, Row, Told

SOURCES = Path(__file__).parent / "sources.yaml"
# Schedules that weft has not.
_OTHERS = ("ZB-2p", "ZB-V", "V-", "1F1B-I")
_NONE = ("", "1", "1.0")
_ALLOCATED = ("allocated", "memory plan")
_MEMORY = {"GiB": 2**30, "GB": 1e9}


@dataclass(frozen=True)
class Conventions:
    """Facts of a framework that its rows do not tell.

    Attributes:
        fused: attention is one kernel.
        dropout: its models have it.
        predicted: share of the tokens of which logits are computed, where a model predicts masked ones only.
        zero, recompute, sequence_parallel: those that are taken where a row tells none.
    """

    fused: bool = False
    dropout: bool = False
    predicted: float = 1.0
    zero: int = 0
    recompute: str = ""
    sequence_parallel: bool = False

    def of(self, form: Form) -> Form:
        """A model as the framework trains it."""
        some = form.masked and self.predicted < 1
        predicted = max(1, round(self.predicted * form.length)) if some else 0
        return replace(form, fused=self.fused, dropout=self.dropout, predicted=predicted)


@cache
def _sources() -> Mapping[str, Any]:
    return dict(yaml.safe_load(SOURCES.read_text()))


def _looked_up(table: str, text: str) -> str:
    """The entry of the first key that the text contains."""
    found = next((value for key, value in _sources()[table].items() if key in text), None)
    if found is None:
        raise ValueError(f"nothing in {table} of {SOURCES.name} fits {text!r}")
    return str(found)


def published(name: str, number: int, told: Told) -> Row:
    """A row of the common columns.

    Raises:
        ValueError: when a figure that a prediction needs is not told, or its kind of model is not known here.
    """
    out_of_memory = _out_of_memory(told["status"])
    topology = _looked_up("topologies", f"{name}: {told['hardware']} {told['interconnect']}")
    _refuse_what_weft_has_not(told)
    ranks = _ranks(told)
    form = form_of(told, ranks.tensor)
    sequences, micro_batches = _batches(told, ranks)
    key = _looked_up("frameworks", f"{name}: {told['framework']}; {told['hardware']}")
    usual = Conventions(**_sources()["conventions"].get(key, {}))
    layers = 1
    if isinstance(form, Form):
        layers, form = int(told["layers"]) // form.layers_of_block, usual.of(form)
    elif ranks.tensor * ranks.pipeline > 1:
        raise ValueError("a convolutional model in parts")
    chunks = _chunks(told["vpp"], int(told["layers"] or 1), ranks.pipeline)
    if ranks.pipeline * chunks > layers:
        raise ValueError(f"{layers} layers in {ranks.pipeline * chunks} stages")
    seconds = _seconds(told, sequences * micro_batches * ranks.data)
    return Row(
        file=name,
        group=told["group"],
        id=told["row_id"],
        form=form,
        layers=layers,
        data=ranks.data,
        tensor=ranks.tensor,
        pipeline=ranks.pipeline,
        chunks=chunks,
        zero=_zero(told) if told["zero_stage"] or "FSDP" in told["sharding"] else usual.zero,
        sequences=sequences,
        micro_batches=micro_batches,
        recompute=_recompute(told["recompute"]) or usual.recompute,
        sequence_parallel=ranks.tensor > 1
        and (told["seq_parallel"] == "1" or (not told["seq_parallel"] and usual.sequence_parallel)),
        dtype=_dtype(told["precision"]),
        topology=topology,
        schedule=_schedule(told["pp_schedule"], chunks),
        seconds=seconds if not out_of_memory else None,
        memory=_memory(told) if not out_of_memory else None,
        out_of_memory=out_of_memory,
        allocated=any(text in told["mem_kind"] for text in _ALLOCATED),
    )


def _refuse_what_weft_has_not(told: Told) -> None:
    """Leave rows out that the product cannot plan, with the reason."""
    precision = told["precision"].lower()
    reasons = {
        f"expert parallel: ep = {told['ep']}": told["ep"] not in _NONE,
        f"split sequences: cp = {told['cp']}": told["cp"] not in _NONE,
        f"precision {told['precision']}": any(x in precision for x in ("fp4", "fp8", "float8")),
        f"schedule {told['pp_schedule']}": told["pp_schedule"].startswith(_OTHERS),
        "adapters": told.get("task") == "lora",
        "the vocabulary's work is moved between stages": bool(told.get("vocab_method")),
        "parameters split inside nodes only": "in node" in told["zero_stage"]
        or "HSDP" in told["sharding"],
    }
    if (reason := next((text for text, holds in reasons.items() if holds), None)) is not None:
        raise ValueError(reason)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a row along each axis."""

    data: int
    tensor: int
    pipeline: int


def _ranks(told: Told) -> _Ranks:
    """The ranks of a row; the axis of data, or their number, follows from the others where it is not told."""
    if not told["tp"] and not told["pp"] and not told["dp"] and told["n_gpus"] != "1":
        raise ValueError("how ranks share the work is not told")
    tensor, pipeline = (int(float(told[key] or 1)) for key in ("tp", "pp"))
    others = tensor * pipeline
    told_data = int(told["dp"] or 0)
    count = int(told["n_gpus"] or told_data * others)
    if not count:
        raise ValueError("n_gpus is not told")
    data = told_data or count // others
    if not told["dp"] and (not told["tp"] or not told["pp"]) and count > 1:
        raise ValueError("how ranks share the work is not told")
    if data * others != count:
        raise ValueError(f"dp × tp × pp = {data * others} of {count} devices")
    return _Ranks(data, tensor, pipeline)


def _batches(told: Told, ranks: _Ranks) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches of a step: of both and the batch, two are enough.

    With a pipeline and neither told, a micro-batch is one sequence, as its users take it.
    """
    each, count, batch = (
        int(float(told[key] or 0)) for key in ("micro_batch", "grad_acc", "global_batch")
    )
    if batch and not each:
        each = batch // (ranks.data * count) if count else ranks.pipeline > 1
    if not each:
        raise ValueError("micro_batch is not told")
    if not batch and not count:
        raise ValueError("neither global_batch nor grad_acc is told")
    found = round(batch / (ranks.data * each)) if batch else count
    if not found:
        raise ValueError(f"{batch} sequences a step are none for each of {ranks.data} ranks")
    return int(each), found


def _seconds(told: Told, sequences: int) -> float | None:
    """Seconds of a step: as told, or from the throughput."""
    seconds = told["step_time_s"] or told["step_time_s_derived"]
    if seconds:
        return float(seconds)
    return sequences / float(told["samples_per_s"]) if told.get("samples_per_s") else None


def _out_of_memory(status: str) -> bool:
    """True for a row that did not fit.

    Raises:
        ValueError: when it is neither that nor measured.
    """
    if status == "ok":
        return False
    if status.lower().startswith("oom"):
        return True
    raise ValueError(f"status {status!r}")


def _chunks(text: str, layers: int, pipeline: int) -> int:
    """Stages of a rank, told as such or by the layers of one."""
    if not text:
        return 1
    *_, number = text.split()
    if "layers per chunk" in text:
        return max(1, layers // (pipeline * int(number)))
    return int(float(number)) if pipeline > 1 else 1


def _zero(told: Told) -> int:
    text = told["zero_stage"] + told["sharding"]
    if "FSDP" in text or text.startswith("FULL_SHARD"):
        return 3
    return int(text[0]) if text[:1].isdigit() else 0


def _recompute(text: str) -> str:
    """The form of recomputation; empty where it is not told."""
    for known in ("full", "selective", "none"):
        if text.startswith(known):
            return known
    return ""


def _dtype(text: str) -> str:
    if text == "fp32":
        return "float32"
    return "bfloat16" if "bf16" in text.lower() else "float16"


def _schedule(text: str, chunks: int) -> str:
    if chunks > 1:
        return "interleaved"
    return "zero_bubble" if text.startswith(("ZB", "V-")) else "1f1b"


def _memory(told: Told) -> float | None:
    if not told["mem_gb"]:
        return None
    unit = next((size for name, size in _MEMORY.items() if name in told["mem_kind"]), 1e9)
    return float(told["mem_gb"]) * unit


# Vocabularies are padded so that every rank has as many rows (Megatron-LM's make-vocab-size-divisible-by).
_PADDED = 128
# Where they are not told: Megatron-LM's padded GPT-2 vocabulary, and the context of GPT-2.
_VOCABULARY, _LENGTH = 51200, 1024
# Heads are of this size where they are not told (GPT-3, Llama).
_HEAD = 128
_LLAMA = ("llama",)
_BIASED = ("gpt", "bert", "nemotron")


def form_of(told: Told, tensor: int) -> Form | Residual:
    """The model of a row, whose vocabulary `tensor` ranks share.

    Raises:
        ValueError: when its kind is not known here, or a size is not told.
    """
    arch = told["arch"]
    if arch.startswith("cnn"):
        return _residual(told)
    mixture = "moe" in arch
    if not arch.startswith((*_LLAMA, *_BIASED)) or (mixture and not told.get("experts")):
        raise ValueError(f"arch {arch!r}")
    for key in ("layers", "hidden"):
        if not told[key]:
            raise ValueError(f"{key} is not told")
    llama, width = arch.startswith(_LLAMA), int(told["hidden"])
    heads = int(told["heads"] or _usual_heads(width, tensor))
    multiple = _PADDED * tensor
    return Form(
        width=width,
        heads=heads,
        pairs=int(told["kv_heads"] or heads),
        hidden=int(told["ffn_hidden"] or 4 * width),
        vocabulary=multiple * ceil(int(told["vocab"] or _VOCABULARY) / multiple),
        length=int(told["seq_len"] or _LENGTH),
        llama=llama,
        tied=told["tied_emb"] in ("1", "yes") or (not llama and told["tied_emb"] != "0"),
        masked=arch.startswith("bert"),
        experts=int(told["experts"]) if mixture else 0,
    )


def _usual_heads(width: int, tensor: int) -> int:
    """As many heads as divide the width among the ranks, of a size next to the usual one."""
    fitting: Iterable[int] = (n for n in range(tensor, width + 1, tensor) if width % (2 * n) == 0)
    found = min(fitting, key=lambda heads: abs(width / heads - _HEAD), default=0)
    if not found:
        raise ValueError(f"no number of heads divides {width} among {tensor} ranks")
    return found


def _residual(told: Told) -> Residual:
    """A residual net of 50 layers: ResNet-50, or one "C160 W2" wide, as its model, group or arch says."""
    text = " ".join((told["arch"], told["model"], told["group"])).replace("-", " ")
    sizes = {word[0]: word[1:] for word in text.split() if word[0] in "CW" and word[1:].isdigit()}
    if "C" in sizes and "W" in sizes:
        return Residual(width=int(sizes["C"]), widening=int(sizes["W"]), classes=1024)
    if "ResNet50" in told["model"] and "Wide" not in told["model"]:
        return Residual()
    raise ValueError(f"the widths of model {told['model']!r} are not told")
