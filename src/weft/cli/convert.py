"""`weft export` and `weft import`: a checkpoint as the files of Hugging Face, and the other way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.errors import wrong
from weft.program.checkpoint.exported import export, import_model
from weft.units import Bytes, bytes_text, counted


def export_checkpoint(
    checkpoint: Path, folder: Path, megabytes: int, dtype: str, masters: bool
) -> str:
    """Write the model of a checkpoint as safetensors with an index; returns a line that says what was written.

    Args:
        checkpoint: the folder of a checkpoint.
        folder: that is not there yet.
        megabytes: of a file at most, of 10^6 bytes.
        dtype: that numbers are rounded to; "" for as they are.
        masters: take float32 masters in place of what they are rounded to.

    Raises:
        UserError: it cannot be read or written.
    """
    most = Bytes(megabytes * 10**6)
    done = export(checkpoint.absolute(), folder.absolute(), most, dtype, masters)
    return f"{folder}: {counted(done.tensors, 'tensor')}, {bytes_text(done.bytes)}"


def import_files(source: Path, checkpoint: Path, renamed: Sequence[str] = ()) -> str:
    """Write a checkpoint of safetensors files; returns a line that says what was written.

    Args:
        source: the folder of the files.
        checkpoint: the folder, which is not there yet.
        renamed: "PATTERN=REPLACEMENT" of names, as `weft.Weights` takes them.

    Raises:
        UserError: it cannot be read or written.
    """
    for each in renamed:
        if "=" not in each:
            raise wrong("--rename", "PATTERN=REPLACEMENT", each)
    names = dict(each.split("=", 1) for each in renamed)
    done = import_model(source.absolute(), checkpoint.absolute(), names)
    return f"{checkpoint}: {counted(done.tensors, 'tensor')}, {bytes_text(done.bytes)}"
