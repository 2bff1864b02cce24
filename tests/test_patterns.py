"""One grammar of name patterns: the matcher's laws, the examples of docs/patterns.md, each that uses it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from single_device import compiled
from weft.errors import StrategyError, UserError
from weft.ir.logical import Call
from weft.patterns import around, check_named, covers, first_match, matches

PAGE = Path(__file__).parent.parent / "docs" / "patterns.md"
EXAMPLES = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no) \| (yes|no) \|$", PAGE.read_text(), re.M)

parts = st.text("ab0", min_size=1, max_size=3)
paths = st.lists(parts, min_size=1, max_size=4).map(".".join)
leaves = st.lists(st.one_of(parts, st.sampled_from(["[0]", "[12]"])), min_size=1).map(".".join)
patterns = st.text("ab0.*?", min_size=1, max_size=6)


@pytest.mark.parametrize(("pattern", "name", "named", "covered"), EXAMPLES)
def test_examples_of_the_page(pattern: str, name: str, named: str, covered: str) -> None:
    assert matches(pattern, name) is (named == "yes")
    assert covers(pattern, name) is (covered == "yes")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 20


def slowly(pattern: str, name: str) -> bool:
    """The grammar by definition: `*` takes none or one more character, and so on."""
    if not pattern or not name:
        return not name and not pattern.strip("*")
    if pattern[0] == "*":
        return slowly(pattern[1:], name) or slowly(pattern, name[1:])
    return pattern[0] in ("?", name[0]) and slowly(pattern[1:], name[1:])


@given(patterns, paths)
def test_matches_what_the_grammar_says(pattern: str, name: str) -> None:
    assert matches(pattern, name) is slowly(pattern, name)


@given(leaves)
def test_a_name_matches_itself(name: str) -> None:
    assert matches(name, name)
    assert matches("*", name)
    assert covers(name, f"{name}.below")
    assert not matches(name, f"{name}.below")


@given(patterns, paths)
def test_a_pattern_covers_what_it_names_and_all_below(pattern: str, path: str) -> None:
    named = any(matches(pattern, one) for one in around(path))
    of_stem = pattern.endswith(".*") and any(matches(pattern[:-2], one) for one in around(path))
    assert covers(pattern, path) is (named or of_stem)
    assert covers(pattern, f"{path}.below") or not covers(pattern, path)


@given(paths)
def test_around_goes_from_the_outermost_to_the_path(path: str) -> None:
    found = list(around(path))
    assert found[-1] == path
    assert [outer for outer, _ in pairwise(found)] == [
        inner.rpartition(".")[0] for inner in found[1:]
    ]


def test_the_model_itself() -> None:
    assert not list(around(""))
    assert not covers("*", "")


@given(st.lists(patterns), paths)
def test_the_first_that_matches_counts(several: list[str], name: str) -> None:
    every = [pattern for pattern in several if matches(pattern, name)]
    assert first_match(several, name) == (every[0] if every else None)


@given(patterns, st.lists(paths))
def test_what_names_nothing_is_refused(pattern: str, names: list[str]) -> None:
    if pattern == "*" or any(matches(pattern, name) for name in names):
        check_named("here", pattern, names, "modules")
        return
    with pytest.raises(StrategyError, match="^here matches nothing; modules that exist: ") as error:
        check_named("here", pattern, names, "modules")
    assert not names or any(name in str(error.value) for name in names)


def gpt(strategy: weft.Strategy) -> weft.Program:
    with compiled(GPT(layers=2), token_loss, token_batch(), [0, 1], strategy) as program:
        return program


FIELDS: Mapping[str, Callable[[str], weft.Strategy]] = {
    "batch": lambda name: weft.Strategy(batch={name: weft.split(0)}),
    "parameters": lambda name: weft.Strategy(parameters={name: weft.broadcast}),
    "activations": lambda name: weft.Strategy(activations={name: weft.broadcast}),
    "recompute": lambda name: weft.Strategy(recompute=[name]),
    "offload": lambda name: weft.Strategy(offload=[name]),
    "stages": lambda name: weft.Strategy(
        stages=[
            weft.Stage(["*"], weft.placement("cpu", [0])),
            weft.Stage([name], weft.placement("cpu", [1])),
        ]
    ),
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_says_what_exists(field: str) -> None:
    with pytest.raises(StrategyError, match=rf"^{field}.*'blocs\.0'.*matches nothing; .* exist: "):
        gpt(FIELDS[field]("blocs.0"))


def test_tensors_below_a_module_are_named_by_a_star() -> None:
    with pytest.raises(StrategyError, match=r"; 'blocks\.0\.\*' names all below it$"):
        gpt(FIELDS["parameters"]("blocks.0"))


def again(pattern: str) -> set[str]:
    """The modules whose forward is made again."""
    calls = gpt(FIELDS["recompute"](pattern)).graph.of_kind(Call)
    copies = (call for call in calls if call.makes[0].name.endswith(".again"))
    return {call.location.module for call in copies if call.location}


def test_recompute_names_modules_at_any_depth() -> None:
    every = again("blocks.*")
    assert every == again("blocks.?")
    assert again("*.attention") == again("blocks.*.attention") <= every
    assert again("*.attention")


def test_leaves_of_a_tuple_are_padded_by_their_keys() -> None:
    buckets = weft.Buckets((4,), {"[0]": 0, "[1].*": -100})
    ids, labels = torch.ones(2, 3), torch.ones(2, 3)
    padded = buckets.padded((ids, {"y": labels}))
    assert padded[0][0].tolist() == [1, 1, 1, 0]
    assert padded[1]["y"][0].tolist() == [1, 1, 1, -100]


def test_explain_covers_modules() -> None:
    program = gpt(weft.data_parallel())
    assert "attention.qkv" in program.explain(op="blocks.0")
    assert "mlp" not in program.explain(op="blocks.*.attention")
    with pytest.raises(UserError, match=r"op='blocs\.0'"):
        program.explain(op="blocs.0")


def test_distribute_takes_the_first_that_matches() -> None:
    with weft.local_world(2):
        placement = weft.placement("cpu", [0, 1])
        layouts = {"0.*": weft.split(0), "*": weft.broadcast}
        made = weft.distribute(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), placement, layouts)
        parameters: list[Any] = list(made.parameters())
        assert [str(x.sbp[0]) for x in parameters] == ["S(0)", "S(0)", "B", "B"]
