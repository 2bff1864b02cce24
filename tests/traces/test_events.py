"""Notes that stand once for all layers."""

from __future__ import annotations

from weft.traces.events import joined_notes


def test_notes_of_layers_are_joined() -> None:
    notes = [f"zero: blocks.{n}.up.bias stays: no dimension has 8 elements" for n in range(3)]
    notes += ["cut at layers.1.2.x", "cut at head"]
    assert joined_notes(notes) == [
        "zero: blocks.*.up.bias stays: no dimension has 8 elements (×3)",
        "cut at layers.*.*.x",
        "cut at head",
    ]
