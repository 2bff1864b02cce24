"""The parts of a model: units in order, what they hold and exchange, and what stands for several of them."""

from __future__ import annotations

from search.jobs import decoder, layers
from weft.hardware import CostModel
from weft.search.steps.parts import Parts, parts_of
from weft.search.steps.repeated import repeated_blocks


def parts_of_decoder() -> Parts:
    step = decoder()
    return parts_of(step.graph, repeated_blocks(step.modules), CostModel())


def test_units_stand_in_the_order_of_their_calls_and_blocks_are_whole() -> None:
    units = list(parts_of_decoder().units)
    blocks = [path for path in units if path.startswith("blocks.")]
    assert blocks == ["blocks.0", "blocks.1", "blocks.2"]
    assert units.index("tokens") < units.index("blocks.0") < units.index("head")


def test_a_part_holds_what_nothing_else_reads_and_moves_what_goes_in_and_out() -> None:
    step = layers()
    units = parts_of(step.graph, None, CostModel()).units
    first = units["0"]
    assert first.parameters == 4 * (256 * 256 + 256)
    # Samples and what the layer makes of them, there and back.
    assert first.moved == 2 * 4 * (8 * 256 + 8 * 256)
    # What the loss reads of the last layer stays: the loss is where that is.
    assert units["2"].moved == 2 * 4 * 8 * 256
    assert first.work > units["2"].work > units["1"].work > 0


def test_places_in_all_blocks_and_units_alike_are_parts_and_the_whole_is_none() -> None:
    found = parts_of_decoder()
    patterns = {each.patterns for each in found.every}
    assert any(len(each) == 1 and each[0].startswith("blocks.*.") for each in patterns)
    assert ("blocks",) in patterns
    everything = sum(each.parameters for each in found.units.values())
    assert all(each.parameters < everything for each in found.every)
