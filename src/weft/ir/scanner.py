"""The tokens of the text of graphs and plans, and the values that are made of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, final, get_args

from weft.errors import UserError
from weft.ir.nodes import FORWARD, PerMicroBatch, Phase, PhaseKind, Ref, Specified
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.layout.placement import placement as build_placement
from weft.layout.sbp import REDUCTIONS
from weft.ops.call import TensorSpec, Token, tensor_spec

Word = TypeVar("Word", bound=str)
# Levels of lists in each other, at most; arguments of ops have few.
DEEPEST = 50

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<value>%[A-Za-z0-9_.]+)
    | (?P<constant>![a-z_]+:[A-Za-z0-9_:.]+)
    | (?P<placement>@\d+)
    | (?P<count>\#\d+)
    | (?P<complex>\([-+.\deEjinfa]+j\))
    | (?P<number>-?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+|Infinity|NaN)(?![A-Za-z_]))
    | (?P<word>[A-Za-z_][A-Za-z0-9_.]*)
    | (?P<sign>->|[()\[\]{},:=*])
    )""",
    re.VERBOSE,
)


# For a value that no line before makes, which verification refuses.
_UNKNOWN = tensor_spec((), "unknown")

# Characters of a line that errors show.
_LONGEST = 400


@final
class Scanner:
    """Reads one line of text, token by token.

    Attributes:
        tokens: what is left of the line, first token last (kind, text).
        where: number and text of the line, for errors.
        specs: shapes and dtypes of the values of lines before.
        placements: those declared in lines before.
    """

    def __init__(
        self, line: str, number: int, specs: dict[str, TensorSpec], placements: list[Placement]
    ) -> None:
        self.specs, self.placements = specs, placements
        text = line.strip()
        self.where = f"line {number}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"
        self.tokens: list[tuple[str, str]] = []
        position, end = 0, len(line.rstrip())
        while position < end:
            match = _TOKEN.match(line, position)
            if match is None:
                text = line[position:].strip()[:20]
                raise self.error(f"cannot read {text!r}", "; expected text as weft prints it")
            self.tokens.append((str(match.lastgroup), match.group(match.lastgroup or 0)))
            position = match.end()
        self.tokens.reverse()

    def error(self, message: str, expected: str = "") -> UserError:
        return UserError(f"{message} in {self.where}{expected}")

    def peek(self) -> str:
        """Text of the next token; empty at the end of the line."""
        return self.tokens[-1][1] if self.tokens else ""

    @property
    def _next(self) -> str:
        return repr(self.peek()) if self.tokens else "nothing"

    def kind(self) -> str:
        """Kind of the next token; empty at the end of the line."""
        return self.tokens[-1][0] if self.tokens else ""

    def take(self, kind: str) -> str:
        """The next token, which must be of `kind`."""
        if self.kind() != kind:
            raise self.error(f"expected a {kind}, got {self._next}")
        return self.tokens.pop()[1]

    def accept(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        if self.peek() != text or self.kind() == "string":
            return False
        self.tokens.pop()
        return True

    def expect(self, text: str) -> None:
        """Take the next token, which must be `text`."""
        if not self.accept(text):
            raise self.error(f"expected {text!r}, got {self._next}")

    def know(self, *values: Specified) -> None:
        """The line makes these values, which later lines may read."""
        self.specs.update((value.name, value.spec) for value in values)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Read all of the line; name it where something in it is of another kind than what is there takes."""
        try:
            yield
            if self.tokens:
                raise self.error(f"unexpected {self.peek()!r}", "; expected the end of the line")
        except UserError as error:
            if self.where in str(error):
                raise
            raise self.error(f"cannot read {error}") from error
        except (TypeError, ValueError, KeyError) as error:
            raise self.error(f"cannot read {error}", "; expected text as weft prints it") from error

    def string(self) -> str:
        return str(json.loads(self.take("string")))

    def integer(self) -> int:
        text = self.take("number")
        if not text.lstrip("-").isdigit():
            raise self.error(f"expected a whole number, got {text!r}")
        return int(text)

    def name(self) -> str:
        """A value's name, without the `%`."""
        return self.take("value")[1:]

    def target(self) -> str | None:
        """A value's name; None for `_`, where there is no value."""
        return None if self.accept("_") else self.name()

    def targets(self) -> list[str | None]:
        """The names on the left side of a line, `%a, _, %b`."""
        names = [self.target()]
        while self.accept(","):
            names.append(self.target())
        return names

    def one_of(self, words: Sequence[Word], else_: str = "") -> Word:
        """One of some words; errors name `else_`, such as "call, box or ", beside them."""
        found = self.take("word")
        for word in words:
            if word == found:
                return word
        raise self.error(f"expected {else_}one of {', '.join(words)}, got {found!r}")

    def names(self) -> list[str]:
        """One or more values, separated by commas."""
        found = [self.name()]
        while self.accept(","):
            found.append(self.name())
        return found

    def integers(self) -> tuple[int, ...]:
        """`[2, 3]`"""
        items = self.argument()
        if not isinstance(items, tuple) or not all(type(item) is int for item in items):
            raise self.error(f"expected a list of whole numbers, got {items}")
        return items

    def references(self) -> tuple[str, ...]:
        """`[%a, %b]`"""
        items = self.argument()
        if not isinstance(items, tuple) or not all(isinstance(item, Ref) for item in items):
            raise self.error("expected a list of values")
        return tuple(item.name for item in items)

    def argument(self, depth: int = 0) -> Any:
        """One argument tree (see `weft.ir.forms.argument_text`)."""
        kind, text = self.kind(), self.peek()
        if depth > DEEPEST:
            raise self.error(f"lists are nested more than {DEEPEST} levels deep")
        inner = partial(self.argument, depth + 1)
        if self.accept("["):
            return self._items("]", inner)
        if self.accept("vary"):
            self.expect("(")
            return PerMicroBatch(self._items(")", inner))
        if kind not in ("value", "constant", "string", "complex", "number", "word"):
            raise self.error(f"expected an argument, got {self._next}")
        self.tokens.pop()
        return _leaf(kind, text, self)

    def _items(self, closing: str, item: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        while not self.accept(closing):
            if found:
                self.expect(",")
            found.append(item())
        return tuple(found)

    def call(self) -> dict[str, Any]:
        """`aten.sum.default(%x, dtype=…)` as `op`, `args` and `kwargs`."""
        op = self.take("word")
        self.expect("(")
        items = self._items(")", self._call_item)
        args = tuple(item for key, item in items if not key)
        return {"op": op, "args": args, "kwargs": tuple((k, item) for k, item in items if k)}

    def _call_item(self) -> tuple[str, Any]:
        if self.kind() == "word" and len(self.tokens) > 1 and self.tokens[-2][1] == "=":
            key = self.take("word")
            self.expect("=")
            return key, self.argument()
        return "", self.argument()

    def layout(self) -> Layout | None:
        """` @0(S(0), B)`, or None when no layout is here."""
        if self.kind() != "placement":
            return None
        index = int(self.take("placement")[1:])
        if index >= len(self.placements):
            raise self.error(f"placement @{index} is not declared")
        self.expect("(")
        return Layout(self.placements[index], self._items(")", self._sbp))

    def free_sbps(self) -> tuple[SBP | None, ...]:
        """`(S(0), *)`, where a star leaves an axis free."""
        self.expect("(")
        return self._items(")", lambda: None if self.accept("*") else self._sbp())

    def _sbp(self) -> SBP:
        word = self.take("word")
        if word == "B":
            return Broadcast()
        self.expect("(")
        sbp: SBP | None = None
        if word == "S":
            sbp = Split(self.integer())
        elif word == "P":
            reduction = next((r for r in REDUCTIONS if r == self.peek()), None)
            sbp = None if reduction is None else Partial(reduction)
            self.take("word")
        if sbp is None:
            raise self.error("expected S(dim), B or P(reduction)")
        self.expect(")")
        return sbp

    def phase(self) -> Phase:
        """`{1 backward}`, or nothing: the forward of stage 0."""
        if not self.accept("{"):
            return FORWARD
        stage, word = self.integer(), self.take("word")
        kind = next((kind for kind in get_args(PhaseKind) if kind == word), None)
        if kind is None:
            raise self.error(f"expected one of {', '.join(get_args(PhaseKind))}, got {word!r}")
        self.expect("}")
        return Phase(stage, kind)

    def count(self) -> int | None:
        """`#12`, or nothing: the number of a call's autograd node."""
        return int(self.take("count")[1:]) if self.kind() == "count" else None

    def micro(self) -> int:
        """`micro 4`, or nothing: one micro-batch."""
        return self.integer() if self.accept("micro") else 1

    def declare_placement(self) -> None:
        """`@0 = cpu [[0, 1], [2, 3]]`, of the next number."""
        if self.take("placement") != f"@{len(self.placements)}":
            raise self.error(f"expected placement @{len(self.placements)}")
        self.expect("=")
        device_type = self.take("word")
        self.placements.append(build_placement(device_type, self.argument()))


def _leaf(kind: str, text: str, scanner: Scanner) -> Any:
    match kind:
        case "value":
            return Ref(text[1:], scanner.specs.get(text[1:], _UNKNOWN))
        case "constant":
            return Token(*text[1:].split(":", 1))
        case "string":
            return json.loads(text)
        case "complex":
            return complex(text)
        case "number":
            if text.lstrip("-").isdigit():
                return int(text)
            return float(text)
    if text in ("True", "False", "None"):
        return ast.literal_eval(text)
    raise scanner.error(f"unknown word {text!r}")
