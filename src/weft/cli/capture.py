"""`weft capture`: the graph file of a job. `weft export`, `weft import`: a checkpoint as the files of Hugging Face."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from traceback import format_exception
from types import ModuleType
from typing import Any

from weft.errors import UserError, wrong
from weft.files import PACKAGE
from weft.program.checkpoint.exported import export, import_model
from weft.program.planning.step import Job
from weft.strategy.strategy import Strategy
from weft.units import Bytes, bytes_text, counted


def capture_job(target: str, output: Path, strategy: Strategy, device_type: str) -> str:
    """Write the graph file of a job; returns a line that says what it holds.

    Args:
        target: "module:name" of a `weft.Job`, or of a function without arguments that returns one. The module is
            found as `python -m module` finds it in the current folder.
        output: the graph file.
        strategy: the step will be planned with: see `weft.Job.stored`.
        device_type: where it will run.

    Raises:
        UserError: there is no such job, or it cannot be captured or written.
    """
    stored = find_job(target).stored(device_type, strategy)
    stored.save(output)
    size = output.stat().st_size
    return (
        f"{output}: {stored.graph.name}, {counted(len(stored.graph.nodes), 'node')}, {size} bytes"
    )


def find_job(target: str) -> Job:
    """The job that `target` names.

    Raises:
        UserError: names what was expected of the module.
    """
    found = find_function(target)
    made = found if isinstance(found, Job) or not callable(found) else _called(target, found)
    if not isinstance(made, Job):
        raise UserError(
            f"{target} gives an object of type {type(made).__name__}, expected weft.Job(model, loss_fn, optimizer, "
            "example_batch)"
        )
    return made


def find_function(target: str) -> Any:
    """The object that `target` names, as it is in its module: a job, or what is to return one.

    Raises:
        UserError: there is no such module, or nothing of that name in it.
    """
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute.isidentifier()):
        raise UserError(
            f"a job must be module:function, such as my_job:job for the function job of my_job.py, got {target!r}"
        )
    module = _imported(name)
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or name
        raise UserError(
            f"{where} has no {attribute!r}; expected a function without arguments that returns "
            "weft.Job(model, loss_fn, optimizer, example_batch)"
        )
    return getattr(module, attribute)


def _imported(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
        raise UserError(
            f"a job's module is named as Python imports it, such as my_job or package.my_job, got {name!r}; "
            "leave .py and folders out, and run the command in the module's folder"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own cannot find is theirs to see, with its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _from_users_code(name, error) from error
        raise UserError(
            f"there is no module {error.name!r} in {os.getcwd()}, nor installed; run the command in its folder"
        ) from None
    except UserError:
        raise
    except Exception as error:
        raise _from_users_code(name, error) from error


def _from_users_code(what: str, error: Exception) -> UserError:
    """An error of the user's own code in words: its traceback, from their first line on."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename.startswith(("<frozen importlib", PACKAGE))
        or Path(frames.tb_frame.f_code.co_filename).parent.name == "importlib"
    ):
        frames = frames.tb_next
    shown = "".join(format_exception(type(error), error, frames)).rstrip()
    return UserError(f"{what} raised an error:\n{shown}")


def _called(target: str, function: Callable[..., Any]) -> Any:
    parameters: Iterable[Parameter] = ()
    with suppress(ValueError):  # Python does not know those of some of its own functions
        parameters = signature(function).parameters.values()
    needed = [
        each.name
        for each in parameters
        if each.default is Parameter.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise UserError(
            f"the function of a job must have no required arguments, but {target} needs {', '.join(needed)}; give "
            "them defaults"
        )
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        raise _from_users_code(target, error) from error


def export_checkpoint(
    checkpoint: Path, folder: Path, megabytes: int, dtype: str, masters: bool
) -> str:
    """Write the model of a checkpoint as safetensors with an index; returns a line that says what was written.

    Args:
        checkpoint: the folder of a checkpoint.
        folder: that is not there yet.
        megabytes: of a file at most, of 10^6 bytes.
        dtype: that numbers are rounded to; "" for as they are.
        masters: take FP32 main parameters in place of what they are rounded to.

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
