"""Graph files: a captured step as text that another machine plans, without torch and without the model.

The first line says the version of the format and a checksum of the rest. The second is a JSON object: who wrote
the file, and what the step was captured for. The others are the logical graph (`weft.ir.parse_graph`). Files whose
name ends with ".gz" are compressed. All of it is data: nothing in a file is executed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, final

from weft.atomic_files import cannot_write
from weft.cached import cached_property
from weft.compiler.training.gradients import SEED
from weft.errors import UNREADABLE, RuleError, UserError, WeftError
from weft.ir import parse_graph, verify
from weft.ir.logical import Call, Input, LogicalGraph
from weft.layout import Reduction
from weft.layout.placement import DEVICE_NAMES
from weft.ops import runs_whole
from weft.ops.rule import Rule, declared_rules, has_rule, rule
from weft.schema import Length, OneOf, read
from weft.strategy.precision import Precision
from weft.strategy.strategy import Strategy
from weft.version import __version__

FORMAT = 1
# For the text of a file; a step of a thousand layers takes some tens of megabytes.
MAX_BYTES = 1 << 29
_MAGIC = f"weft graph {FORMAT} sha256:"
# Elements of a tensor, far above any.
_LARGEST = 2**50
_GZIP = b"\x1f\x8b"
_DAMAGE: tuple[type[Exception], ...] = (*UNREADABLE, WeftError, zlib.error)


@final
@dataclass(frozen=True)
class StoredStep:
    """A captured step, as a graph file holds it.

    Attributes:
        graph: the step on whole tensors; no layouts yet.
        device_type: it was captured for.
        precision: it was captured for (`Precision.captured`).
        apart: names of the parameters that were taken to be in pieces.
        recurrent: names of the parameters of recurrent layers: the step must be captured again
            if other such parameters are split.
        modules: paths of all modules of the model, for patterns.
        optimizers: the class of each.
        torch: the version that captured it.
        rules: of ops that weft does not know, as plain data.
    """

    graph: LogicalGraph
    device_type: str = "cpu"
    precision: Precision = field(default_factory=Precision)
    apart: frozenset[str] = frozenset()
    recurrent: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    torch: str = ""
    rules: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def rules_of(graph: LogicalGraph) -> dict[str, Any]:
        """The rules that the file of a graph has to bring along.

        Raises:
            UserError: when one of them is no plain data.
        """
        return rules_for(_ops(graph))

    def save(self, path: str | Path) -> None:
        """Write the file; equal steps give equal bytes.

        Raises:
            UserError: when it cannot be written.
        """
        text = self._text()
        content = f"{_MAGIC}{hashlib.sha256(text).hexdigest()}\n".encode() + text
        if Path(path).suffix == ".gz":
            content = gzip.compress(content, mtime=0)
        try:
            Path(path).write_bytes(content)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            raise UserError(cannot_write(Path(path), "the graph file", error)) from None

    @cached_property
    def fingerprint(self) -> str:
        """The checksum of its file: equal steps have equal ones."""
        return hashlib.sha256(self._text()).hexdigest()

    def _text(self) -> bytes:
        return f"{json.dumps(self._header(), ensure_ascii=False)}\n{self.graph}".encode()

    def _header(self) -> dict[str, Any]:
        return {
            "weft": __version__,
            "torch": self.torch,
            "device": self.device_type,
            "precision": self.precision.content(),
            "apart": sorted(self.apart),
            "recurrent": sorted(self.recurrent),
            "modules": list(self.modules),
            "optimizers": list(self.optimizers),
            "rules": dict(self.rules),
        }

    def in_precision(self, strategy: Strategy) -> Strategy:
        """A strategy in the precision that the step was captured for, for who says none."""
        captured = self.precision != Precision() and strategy.precision is None
        return replace(strategy, precision=self.precision) if captured else strategy

    @staticmethod
    def load(path: str | Path) -> StoredStep:
        """Read what `save` wrote, with any version of torch; declares the rules that it brings along.

        Raises:
            UserError: the file is damaged, of another version of weft or of the format, or no graph file; it
                names the line.
            RuleError: an op of it has no rule.
        """
        where = f"the graph file {path}"
        header, text = _parts(where, _read(where, Path(path)))
        content = _read_header(where, header)
        step = StoredStep(
            _graph(where, text),
            content.device,
            content.precision,
            frozenset(content.apart),
            frozenset(content.recurrent),
            content.modules,
            content.optimizers,
            content.torch,
            content.rules,
        )
        declare(where, step.rules)
        check_rules(where, _ops(step.graph))
        return step


def _ops(graph: LogicalGraph) -> frozenset[str]:
    """The ops of a graph that need a rule: not the seed of a scaled loss, which a pass takes apart."""
    return frozenset(
        node.op for node in graph.of_kind(Call) if node.hint is None and node.op != SEED
    )


def _read(where: str, path: Path) -> bytes:
    """The bytes of a file, decompressed."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as file:
            found = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"there is no graph file {path}; write it with weft capture") from None
    except _DAMAGE as error:
        raise UserError(f"cannot read {where}: {error}; capture the step again") from None
    if len(found) > MAX_BYTES:
        raise UserError(
            f"{where} has more than {MAX_BYTES} bytes of text, the most that weft reads"
        )
    return found


def _parts(where: str, content: bytes) -> tuple[str, str]:
    """The header and the text of the graph, once the first line fits them."""
    first, _, rest = content.partition(b"\n")
    if not first.startswith(b"weft graph "):
        raise UserError(
            f"{where} is not a graph file: expected a first line {_MAGIC}…, which weft capture writes"
        )
    if not first.startswith(_MAGIC.encode()):
        found = first[:40].decode(errors="replace")
        raise UserError(
            f"{where} has the first line {found!r}, expected format {FORMAT}; capture the step again with weft "
            f"{__version__}"
        )
    if first.decode(errors="replace") != _MAGIC + hashlib.sha256(rest).hexdigest():
        raise UserError(
            f"{where} is damaged: its checksum differs from that in its first line; copy it or capture the step again"
        )
    try:
        header, _, text = rest.decode().partition("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not a text in UTF-8: {error}; capture the step again"
        ) from None
    return header, text


def _graph(where: str, text: str) -> LogicalGraph:
    try:
        graph = verify(parse_graph(text))
        large = next((v for v in graph.values.values() if prod(v.shape) > _LARGEST), None)
        if large is not None:
            raise ValueError(f"{large.name} has the shape {large.shape}")
        return graph
    except _DAMAGE as error:
        raise UserError(
            f"{where}: its graph, from line 3 on, cannot be read: {error}; capture the step again"
        ) from None


_Text: TypeAlias = Annotated[str, Length(0)]


@final
@dataclass(frozen=True)
class _Header:
    """The second line of a file."""

    weft: str
    torch: _Text
    device: Annotated[str, OneOf(DEVICE_NAMES)]
    precision: Precision
    apart: tuple[str, ...]
    recurrent: tuple[str, ...]
    modules: tuple[_Text, ...]
    optimizers: tuple[str, ...]
    rules: Mapping[str, Any]


def _read_header(where: str, text: str) -> _Header:
    where = f"{where}, line 2"
    try:
        content = json.loads(text)
        found = content.get("weft") if isinstance(content, dict) else None
        if isinstance(found, str) and found != __version__:
            raise UserError(f"{where}: written by weft {found}, this is weft {__version__}")
        return read(_Header, content, where)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {error}; capture the step again") from None
    except UserError as error:
        raise UserError(f"{error}; capture the step again") from None


_EMBEDDING = "aten.embedding.default"


@final
class BatchSize(NamedTuple):
    """The size of a step's batch.

    Attributes:
        samples: 0 if the batch has no dimension.
        tokens: 0 if the samples are not sequences of tokens.
    """

    samples: int
    tokens: int


def batch_size(graph: LogicalGraph) -> BatchSize:
    """The size of the batch of a captured step.

    Samples are the first dimension of most of its tensors, of the larger ones where that does not decide. Tokens are
    those of the first tensor of whole numbers [samples, time], in a step that looks something up in an embedding.
    """
    shapes = [
        (node.value.shape, node.value.dtype)
        for node in graph.of_kind(Input)
        if node.role == "batch" and node.value.shape
    ]
    if not shapes:
        return BatchSize(0, 0)
    counted = Counter(shape[0] for shape, _ in shapes)
    samples = max(counted, key=lambda size: (counted[size], size))
    embeds = any(node.op == _EMBEDDING for node in graph.of_kind(Call))
    lengths = (
        shape[1]
        for shape, dtype in shapes
        if embeds and "int" in dtype and len(shape) == 2 and shape[0] == samples
    )
    return BatchSize(samples, samples * next(lengths, 0))


_OWN = {each.name: each.default for each in fields(Rule)}
_Places: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True)
class _PlainRule:
    """The fields of a rule that can be data."""

    factors: str
    linear: tuple[_Places, ...] = ()
    lossy: bool = False
    added: _Places = ()
    monotone: tuple[_Places, ...] = ()
    extrema: tuple[Reduction, ...] = ()
    reduction: Reduction = "sum"
    ignored: _Places = ()
    anyhow: _Places = ()
    kept: _Places = ()
    readers: tuple[str, ...] = ()
    places: _Places = ()
    view: bool = False
    shares: bool = False


def rules_for(ops: frozenset[str]) -> dict[str, dict[str, Any]]:
    """The rules of those of `ops` that somebody declared, as plain data by op.

    Raises:
        UserError: when a field of one is a function.
    """
    return {op: _plain(op, found) for op, found in sorted(declared_rules().items()) if op in ops}


def _plain(op: str, found: Rule) -> dict[str, Any]:
    given = {name: getattr(found, name) for name in _OWN}
    content = {name: value for name, value in given.items() if value != _OWN[name]}
    for name, value in content.items():
        if callable(value):
            raise UserError(
                f"the rule of {op} cannot be in a graph file: its field {name!r} is the function "
                f"{getattr(value, '__qualname__', value)}, expected plain data; declare it as text, such as "
                f'weft.rule("{op}", "m k+, k n -> m n")'
            )
    return content


def declare(where: str, rules: Mapping[str, Any]) -> None:
    """Declare the rules that `rules_for` gave, with lists for tuples, as `weft.rule` does.

    Raises:
        UserError: when something else is there, or another rule of the op is declared here.
    """
    known = declared_rules()
    for op, content in rules.items():
        found = read(_PlainRule, content, f"{where}: the rule of {op!r}")
        options = {name: getattr(found, name) for name in content}
        if op in known and _plain(op, known[op]) != options:
            raise UserError(
                f"{where}: it holds the rule {options['factors']!r} of {op}, which differs from the rule declared "
                "here; capture the step again with this rule"
            )
        if op not in known:
            rule(op, **options)


def check_rules(where: str, ops: frozenset[str]) -> None:
    """Check that each op has a rule, or runs whole.

    Raises:
        RuleError: names the first that has none.
    """
    for op in sorted(ops):
        if not (has_rule(op) or runs_whole(op)):
            raise RuleError(
                f"{where}: the op {op} has no sharding rule; declare one where the step is captured, such as "
                f'weft.rule("{op}", "m k+, k n -> m n"), and capture it again'
            )
