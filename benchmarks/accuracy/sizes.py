"""The sizes of published models, from the columns of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from benchmarks.accuracy.decoder import Form
from benchmarks.accuracy.row import Residual, Told

# Vocabularies are padded so that every rank has as many rows (Megatron-LM's make-vocab-size-divisible-by).
_PADDED = 128
# Where they are not told: Megatron-LM's padded GPT-2 vocabulary, and the context of GPT-2.
_VOCABULARY, _LENGTH = 51200, 1024
# Heads are of this size where they are not told (GPT-3, Llama).
_HEAD = 128
_LLAMA = ("llama",)
_OTHERS = ("gpt", "bert", "nemotron")


def form_of(told: Told, tensor: int) -> Form | Residual:
    """The model of a row, whose vocabulary `tensor` ranks share.

    Raises:
        ValueError: when its kind is not known here, or a size is not told.
    """
    arch = told["arch"]
    if arch.startswith("cnn"):
        return _residual(told)
    mixture = "moe" in arch
    if not arch.startswith((*_LLAMA, *_OTHERS)) or (mixture and not told.get("experts")):
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
