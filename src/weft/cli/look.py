"""`weft ops`: the ops that have a rule, and their legal signatures. `weft doctor`: what is here, and what lacks."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from weft.errors import UNREADABLE, RuleError, UserError
from weft.ops import TensorSpec, factors_of, registered_ops, runs_whole, signatures
from weft.runtime.doctor import check_machine
from weft.runtime.kernels.generated import call_like

_NO_LITERAL: tuple[type[Exception], ...] = (*UNREADABLE, SyntaxError, MemoryError)


def list_ops() -> Iterator[str]:
    """A line for each op that has a rule."""
    yield from (f"{op:<56} {rule_text(op)}" for op in registered_ops())


def show_op(op: str, arguments: Sequence[str], parts: int) -> Iterator[str]:
    """The rule of an op; with arguments, its signatures along an axis of `parts` ranks.

    Args:
        op: such as "aten.mm.default".
        arguments: tensors as "float32[8, 4]" or "[8, 4]" (float32); everything else as a Python
            literal.
        parts: number of ranks.

    Raises:
        RuleError: when the op has no rule and does not run whole.
        UserError: when an argument cannot be read.
    """
    yield f"{op}: {rule_text(op)}"
    if not arguments:
        return
    call = call_like(op, [_parse(text) for text in arguments])
    made = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in call.results if spec)
    yield f"makes {made}; signatures along an axis of {parts} ranks:"
    yield from (f"  {signature}" for signature in signatures(call, parts))


def rule_text(op: str) -> str:
    """The rule of an op in one line: its notation, or the docstring of the function that finds its factors.

    Raises:
        RuleError: when there is none.
    """
    factors = factors_of(op)
    if isinstance(factors, str):
        return factors
    if factors is not None:
        lines = (inspect.getdoc(factors) or "").splitlines()
        return lines[0] if lines else "depends on its shapes and arguments"
    overloads = [name for name in registered_ops() if name.startswith(f"{op}.")]
    if overloads:
        raise RuleError(
            f"{op} names no overload of the op; give one, such as {', '.join(overloads)}"
        )
    if runs_whole(op) and op.count(".") == 2:
        return "whole: every operand is gathered, every rank computes the whole result"
    near = [name for name in registered_ops() if op in name.split(".")] or ["aten.mm.default"]
    raise RuleError(
        f"the op {op} has no sharding rule; expected a name that `weft ops` lists, such as {', '.join(near)}, "
        "or any other ATen op that is a plain function"
    )


def _parse(text: str) -> Any:
    name, bracket, rest = text.partition("[")
    try:
        if bracket and (not name or name.isidentifier()):
            return TensorSpec(tuple(ast.literal_eval(f"[{rest}")), name or "float32")
        return ast.literal_eval(text)
    except _NO_LITERAL:
        raise UserError(
            f"cannot read the argument {text!r}; expected a tensor such as float32[8,4] or a Python literal such as "
            "2, (0, 1), None or \"'mean'\""
        ) from None


def check_this_machine(as_json: bool = False) -> tuple[int, str]:
    """Look over this machine.

    Returns:
        1 where weft cannot run, else 0; and the text to print.
    """
    checks = check_machine()
    bad = any(check.state == "bad" for check in checks)
    if as_json:
        return int(bad), json.dumps([asdict(check) for check in checks])
    width = max(len(check.about) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:4} {check.about:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':4} {'':{width}}  -> {check.advice}")
    lines.append("weft cannot run as this is" if bad else "weft can run here")
    return int(bad), "\n".join(lines)
