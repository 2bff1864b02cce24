"""Read the text of a local program (see `weft.ir.plan`): `parse_local(str(program)) == program`."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.parsers.plan_parser import input_of, local_node
from weft.ir.parsers.scanner import Scanner
from weft.ir.plan import LocalInput, LocalNode, LocalOutput, LocalProgram


def parse_local(text: str) -> LocalProgram:
    """The program that `text` describes.

    Raises:
        UserError: naming the line and what was expected there.
    """
    lines = _scanners(text)
    head = next(lines, None) or Scanner("", 1)
    with head.told():
        for word in ("local", "program", "of", "rank"):
            head.expect(word)
        rank, micro_batches = head.integer(), head.micro()
        head.end()
    loop: frozenset[str] = frozenset()
    origins: dict[str, str] = {}
    inputs: list[LocalInput] = []
    nodes: list[LocalNode] = []
    outputs: list[LocalOutput] = []
    for scanner in lines:
        with scanner.told():
            if scanner.accept("loop"):
                loop |= _loop(scanner)
            elif scanner.accept("form"):
                name = scanner.name()
                scanner.expect("of")
                origins[name] = scanner.name()
            elif scanner.accept("input"):
                inputs.append(input_of(scanner))
            elif scanner.accept("output"):
                key = scanner.string()
                outputs.append(LocalOutput(scanner.name(), key))
            else:
                nodes.append(local_node(scanner))
            scanner.end()
    parts = tuple(inputs), tuple(nodes), tuple(outputs)
    return LocalProgram(rank, *parts, micro_batches, loop, origins)


def _scanners(text: str) -> Iterator[Scanner]:
    """One for each line that is not empty."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Scanner(line, number)


def _loop(scanner: Scanner) -> frozenset[str]:
    """The values of the loop, one after another."""
    names = set()
    while scanner.kind() == "value":
        names.add(scanner.name())
    return frozenset(names)
