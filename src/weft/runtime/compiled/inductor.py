"""Torch's Inductor, the compiler of fused loops: one function over ATen ops in, one fast function out.

All of torch's private interfaces of Inductor that weft needs are here; `tests/runtime/compiled/test_inductor.py`
tests them. They are imported when first needed, since that takes seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final
from unittest.mock import patch

import torch
from torch import Tensor

from weft.errors import UNREADABLE, UserError
from weft.private import (
    FOLDER,
    chosen_folder,
    close_private,
    default_folder,
    is_private,
    make_private,
)

# Takes its inputs as a list, which it empties.
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


@final
class CompiledFunction(NamedTuple):
    """A function that Inductor has compiled.

    Attributes:
        function: takes its inputs as a list, which it empties.
        source: Python code of the same, for `load`; None if code alone is not enough.
    """

    function: Boxed
    source: str | None


def missing_compiler(device_type: str) -> str | None:
    """The reason why Inductor cannot work on devices of this type here; None when it can."""
    if device_type == "cpu":
        builder = _module("torch._inductor.cpp_builder")
        try:
            builder.get_cpp_compiler()
        except Exception as error:  # its class has moved between versions of torch
            return f"there is no C++ compiler ({_line(error)}); install g++ or set CXX"
        return None
    if _module("torch.utils._triton").has_triton():
        return None
    return "there is no Triton; install the package triton"


def compile_boxed(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]
) -> CompiledFunction:
    """Compile a function of plain ATen ops for inputs of the shapes, strides and dtypes of `examples`.

    Results have the strides of `function`'s results, and share memory with the same inputs. Sums may
    be added up in another order. Code compiled before, by any process, is read from disk.
    """
    with ExitStack() as stack:
        for one in _settings(examples):
            stack.enter_context(one)
        table = _module("torch._inductor.decomposition").select_decomp_table()
        trace = _module("torch.fx.experimental.proxy_tensor").make_fx
        with examples[0].fake_mode:  # type: ignore[attr-defined]  # of fake tensors
            graph = trace(function, decomposition_table=table)(*examples)
        _name_linear(graph)
        outputs = next(iter(graph.graph.find_nodes(op="output")))
        # Whoever reads these counts on their strides.
        outputs.meta["user_visible_output_idxs"] = list(range(len(outputs.args[0])))
        compiler = _module("torch._inductor.compile_fx").compile_fx_inner
        compiled = compiler(graph, list(examples), is_inference=True)
    # For nothing but views it makes a plain function; elsewhere than on a CPU, inputs may have to be
    # aligned before.
    whole = getattr(compiled, "source_code", None) and not compiled.constants
    if not whole or compiled.inputs_to_check or examples[0].device.type != "cpu":
        return CompiledFunction(compiled, None)
    # Without what Inductor puts around its own code for CUDA graphs and caches, 5 µs a call.
    return CompiledFunction(compiled.current_callable, compiled.source_code)


def load(source: str) -> Boxed:
    """The function of code that `compile_boxed` made for a CPU, in whatever process.

    Its loops are taken from disk, or compiled again. `source` is run: it must be weft's own.
    """
    namespace: dict[str, Any] = {"__name__": "weft.runtime.kept_kernel"}
    with ExitStack() as stack:
        for one in _places():
            stack.enter_context(one)
        # Vector code was tried when this was compiled; a trial takes 0.2 s.
        stack.enter_context(_module("torch._inductor.config").patch({"cpp.vec_isa_ok": True}))
        exec(compile(source, "<weft kept kernel>", "exec"), namespace)
    function: Boxed = namespace["call"]
    return function


@torch.library.custom_op("weft::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """OneDNN's linear layer: Inductor takes torch's op for constants only."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


@_linear.register_fake
def _like_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _name_linear(graph: torch.fx.GraphModule) -> None:
    """Have Inductor call oneDNN's linear layers as they are."""
    for node in graph.graph.nodes:
        if str(node.target) == "mkldnn._linear_pointwise.default":
            with graph.graph.inserting_before(node):
                linear = graph.graph.call_function(torch.ops.weft.linear.default, node.args[:3])
            linear.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(linear)
            graph.graph.erase_node(node)
    graph.recompile()


def _settings(examples: Sequence[Tensor]) -> list[AbstractContextManager[Any]]:
    """The settings while a function is traced and compiled: none of the caller's modes."""
    guards = _module("torch._guards")
    mode = examples[0].fake_mode  # type: ignore[attr-defined]  # of fake tensors
    return [
        torch.no_grad(),
        torch.autocast(examples[0].device.type, enabled=False),
        guards.tracing(guards.TracingContext(mode)),
        *_places(),
    ]


def check_places() -> None:
    """Check that nobody else may write to where compiled code is kept.

    Raises:
        UserError: names the folder that others may write to.
    """
    for name in ("kernels", "inductor"):
        cache_folder(name)


def _places() -> list[AbstractContextManager[Any]]:
    """The places where Inductor keeps its files, and where it compiles: in this process."""
    folders = _module("torch._inductor.runtime.cache_dir_utils")
    config = _module("torch._inductor.config")
    code = _module("torch._inductor.codecache")
    folder = cache_folder("inductor")
    headers = str(folder / "precompiled_headers")
    return [
        folders.temporary_cache_dir(str(folder)),
        # By default in a folder of a known name in /tmp, which another user may have made.
        patch.object(code, "_HEADER_DIR", headers),
        patch.object(code, "_HEADER_LOCK_DIR", f"{headers}/locks"),
        patch.object(code, "_precompile_header", _precompile_header(headers)),
        # Strides are checked once (`weft.runtime.compiled.parts`); a pool of compiling processes would
        # outlive a rank that fails.
        config.patch(size_asserts=False, compile_threads=1),
    ]


@cache
def _precompile_header(folder: str) -> Callable[..., str]:
    """Inductor's function, which keeps its results for good, with results of its own for each folder."""
    return cache(_module("torch._inductor.codecache")._precompile_header.__wrapped__)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"


# The folder where weft keeps results that are costly to find out again: compiled kernels and measurements.
#
# Compiled kernels are code that is run from there: its folders are this user's alone, which is checked
# whenever they are used, and what others may write to is refused.


_INSTEAD = f"set {FOLDER} to a folder of your own, where nobody else may write"


def cache_folder(name: str) -> Path:
    """A folder of the cache, made and checked; it may be deleted at any time.

    The cache is the folder `WEFT_CACHE`, or `weft` in the user's folder for caches. If others may write to the
    latter, it is a folder for this user in the system's one for temporary files, and a warning says so.

    Raises:
        UserError: others may write to it; names the folder and what would work.
    """
    folder = make_private(_root() / name, _INSTEAD)
    _close_once(folder)
    return folder


# A private folder stays private: nobody else can reach its files.
@cache
def _close_once(folder: Path) -> None:
    close_private(folder, _INSTEAD)


def _root() -> Path:
    chosen = chosen_folder()
    if chosen is not None:
        return make_private(chosen, _INSTEAD)
    try:
        return make_private(default_folder(), _INSTEAD)
    except UserError as error:
        user = os.geteuid() if hasattr(os, "geteuid") else ""
        spare = make_private(Path(tempfile.gettempdir()) / f"weft-{user}", _INSTEAD)
        warnings.warn(f"{error}; compiled code is kept in {spare} until then", stacklevel=3)
        return spare


def read_cached(path: Path) -> Any:
    """The content of a JSON file, or None when there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except UNREADABLE:
        return None


def write_cached(path: Path, content: Any) -> None:
    """Write a JSON file, as `write_text`."""
    write_text(path, json.dumps(content))


def read_code(path: Path) -> str | None:
    """The text of a file; None when there is none, or when another user may have written it."""
    try:
        return path.read_text() if is_private(path) else None
    except (OSError, ValueError):
        return None


def write_text(path: Path, text: str) -> None:
    """Write a file for this user alone, whole: readers see all of it or nothing."""
    part = path.with_suffix(f".{os.getpid()}")
    with open(part, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(text)
    part.replace(path)
