"""What one rank holds in memory, by kind, read off its local program: no run is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.compiler.aliases import VIEW_OPS
from weft.ir.logical import refs
from weft.ir.plan import LocalCall, LocalProgram, LocalValue
from weft.units import ITEM_SIZE, Bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank. `activations` is the most that temporary tensors take at any time, views counted once."""

    parameters: Bytes
    buffers: Bytes
    states: Bytes
    batch: Bytes
    constants: Bytes
    activations: Bytes

    @property
    def peak(self) -> Bytes:
        """All kinds together, when the temporary tensors take most."""
        kinds = (self.parameters, self.buffers, self.states, self.batch, self.constants)
        return Bytes(sum(kinds) + self.activations)


def memory(program: LocalProgram) -> Memory:
    """The memory of a rank that runs the nodes of `program` in their order."""

    def held(role: str) -> Bytes:
        return Bytes(sum(value_bytes(item.value) for item in program.inputs if item.role == role))

    return Memory(
        parameters=held("parameter"),
        buffers=held("buffer"),
        states=held("state"),
        batch=held("batch"),
        constants=held("constant"),
        activations=_peak_of_temporaries(program),
    )


def value_bytes(value: LocalValue) -> Bytes:
    """Size of a local tensor."""
    return Bytes(math.prod(value.shape) * ITEM_SIZE[value.dtype])


def _peak_of_temporaries(program: LocalProgram) -> Bytes:
    bases = _bases(program)
    last: dict[str, int] = {}
    for position, node in enumerate(program.nodes):
        last.update((bases.get(name, name), position) for name in node.reads)
    last.update(
        (bases.get(output.name, output.name), len(program.nodes)) for output in program.outputs
    )
    ending: dict[int, list[str]] = {}
    for name, position in last.items():
        ending.setdefault(position, []).append(name)
    live: dict[str, int] = {}
    now = peak = 0
    for position, node in enumerate(program.nodes):
        for value in node.makes:
            if value.name not in bases:
                live[value.name] = value_bytes(value)
                now += live[value.name]
        peak = max(peak, now)
        dead = [value.name for value in node.makes if value.name not in last]
        now -= sum(live.pop(name, 0) for name in (*ending.get(position, ()), *dead))
    return Bytes(peak)


def _bases(program: LocalProgram) -> dict[str, str]:
    """For each view, the value whose memory it shares."""
    bases: dict[str, str] = {}
    for node in program.nodes:
        if isinstance(node, LocalCall) and node.op in VIEW_OPS:
            first = next(refs(node.args), None)
            if first is not None:
                base = bases.get(first, first)
                bases.update((value.name, base) for value in node.makes)
    return bases
