"""Each rule of the legal-plan table fires on the smallest plan that breaks it."""

from __future__ import annotations

import re

import pytest

from weft.errors import InternalError
from weft.ir.legal.plans import PLAN_RULES, verify_communicators, verify_plan
from weft.ir.parse import parse_plan

HEAD = 'plan "p"\ncommunicator 0 = [0, 1]\nrank 0\n'
X = "register %x : float32[4] batch credits 2 from 0 to [1]\n"
Y = "register %y : float32[4] activation credits 1 from 1 to [2]\n"
FEED = 'actor 0 on "host" feed "x" %x\n'
NEGATE = (
    'actor 1 on "compute" compute [%x] -> [%y]\n  %y = call aten.neg.default(%x) : float32[4]\n'
)
FETCH = 'actor 2 on "host" fetch "loss" %y\n'
LEGAL = HEAD + X + Y + FEED + NEGATE + FETCH

# The batch is read by both micro-batches; their sum is read once.
TOTAL = '  %z = call weft.accumulate(%y, "sum") : float32[]\n'
LOOP = (
    HEAD.replace("rank 0", "rank 0 micro 2")
    + X
    + "register %y : float32[] activation credits 1 rate 2 from 1 to [2]\n"
    + "register %go : bool[0] control credits 1 from 2 to [1] full\n"
    + "register %z : float32[] gradient credits 1 from 2 to [3]\n"
    + FEED
    + 'actor 1 on "compute" compute [%x, %go] -> [%y] acts 2\n'
    + "  %y = call aten.select.int(%x, 0, vary(0, 1)) : float32[]\n"
    + 'actor 2 on "compute" compute [%y] -> [%z, %go] acts 2 priority 1\n'
    + TOTAL
    + 'actor 3 on "host" fetch "loss" %z\n'
)
ORDER = 'rank 0 micro 2\norder "compute" [[1, 0], [2, 0], [1, 1], [2, 1]]\n'

# `x` is reduced where it lies; `w` is updated while a view of it is read; two parts.
REGIONS = (
    HEAD
    + 'input %w = parameter "w" : float32[4]\n'
    + "register %w : float32[4] parameter credits 1 from 1 to [] full\n"
    + X
    + "register %y : float32[4] activation credits 1 from 1 to [2]\n"
    + "register %s : float32[4] communication credits 1 from 2 to [3]\n"
    + FEED
    + 'actor 1 on "compute" compute [%x] -> [%y, %w] copies [%v] parts [1]\n'
    + "  %y = call aten.neg.default(%x) : float32[4]\n"
    + "  %v = call aten.view.default(%w, [4]) : float32[4]\n"
    + '  update "copy" group 0 "w" %w from %v\n'
    + 'actor 2 on "comm:0" communicate\n'
    + '  %s = all_reduce %y : float32[4] -> float32[4] (comm=0, reduction="sum", bytes=32, in_place=True)\n'
    + 'actor 3 on "host" fetch "loss" %s\n'
)

BROKEN = {
    "in_place_is_last": REGIONS.replace("call aten.neg.default(%x)", "call aten.alias.default(%x)"),
    "copies_complete": REGIONS.replace(" copies [%v]", ""),
    "parts_inside": REGIONS.replace("parts [1]", "parts [3]"),
    "rates_fit": LOOP.replace("from 0 to [1]", "rate 2 from 0 to [1]"),
    "versions_complete": LOOP.replace("weft.accumulate", "aten.add.Tensor"),
    "varying_arguments_complete": LOOP.replace("vary(0, 1)", "vary(0, 1, 2)"),
    "control_registers_empty": LOOP.replace("call aten.select.int(%x", "call aten.select.int(%go"),
    "orders_complete": LOOP.replace("rank 0 micro 2\n", ORDER.replace("[2, 1]", "[2, 0]")),
    "actors_numbered": LEGAL.replace("actor 2 on", "actor 3 on"),
    "registers_unique": LEGAL.replace(X, X + X),
    "registers_know_their_actors": LEGAL.replace("from 1 to [2]", "from 1 to []"),
    "nobody_reads_what_it_writes": LEGAL.replace("compute [%x]", "compute [%x, %y]").replace(
        "from 1 to [2]", "from 1 to [1, 2]"
    ),
    "credits_given": LEGAL.replace("credits 1", "credits 0"),
    "held_registers_full": LEGAL.replace('feed "x" %x', "hold %x"),
    "segments_read_what_is_there": LEGAL.replace("aten.neg.default(%x)", "aten.neg.default(%z)"),
}


@pytest.mark.parametrize("text", [LEGAL, REGIONS, LOOP, LOOP.replace("rank 0 micro 2\n", ORDER)])
def test_a_legal_plan_passes(text: str) -> None:
    (rank,) = parse_plan(text).ranks
    assert verify_plan(rank) is rank


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("call aten.neg.default(%x)", "call weft.hint(%x)", "others hold its memory"),
        ("from 1 to [2]", "from 1 to [2, 3]", "actors [3] read it, too"),
        ("%v = call aten.view", "%v = call weft.keep", "hands on w in memory"),
        ("copies [%v]", "copies [%v, %x]", "copies x, but does not hand it on"),
        ("parts [1]", "parts [2, 1]", "not in order: [2, 1]"),
        ("parts [1]", "parts [0]", "begins outside of its 3 nodes"),
    ],
)
def test_what_regions_may_not_do(old: str, new: str, message: str) -> None:
    text = REGIONS.replace(old, new)
    if "actors [3]" in message:
        text = text.replace('fetch "loss" %s', 'fetch "loss" %s, "y" %y')
    if "w in memory" in message:
        text = text.replace("%w from %v", "%w from %w").replace("copies [%v] ", "")
    (rank,) = parse_plan(text).ranks
    with pytest.raises(InternalError, match=re.escape(message)):
        verify_plan(rank)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("acts 2\n", "acts 3\n", "actor 1 acts 3 times in 2 micro-batches"),
        ("rate 2", "rate 3", "y has 3 versions"),
        ("gradient credits 1", "gradient credits 1 rate 2", "actor 3 acts 1 times, z has 2"),
        (TOTAL, TOTAL + "  %n = call aten.neg.default(%z) : float32[]\n", "reads z before"),
        ("bool[0]", "bool[1]", "go is a control register, but not"),
        ("control", "activation", "makes go in each act"),
    ],
)
def test_what_a_loop_may_not_do(old: str, new: str, message: str) -> None:
    assert old in LOOP
    (rank,) = parse_plan(LOOP.replace(old, new)).ranks
    with pytest.raises(InternalError, match=re.escape(message)):
        verify_plan(rank)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[2, 1]]", "[2, 1], [1, 0]]"),  # an act stands twice
        (", [2, 1]]", "]"),  # an act is missing
        ("[1, 0], [2, 0], [1, 1]", "[1, 1], [2, 0], [1, 0]"),  # micro-batches the wrong way round
        ("order", 'order "compute" []\norder'),
    ],
)
def test_an_order_holds_every_act_once(old: str, new: str) -> None:
    text = LOOP.replace("rank 0 micro 2\n", ORDER.replace(old, new))
    with pytest.raises(InternalError, match="breaks the rule orders_complete"):
        verify_plan(parse_plan(text).ranks[0])


def test_only_control_registers_are_waited_for() -> None:
    node = COLLECTIVES["all_reduce"].format(4)
    head = 'actor 1 on "comm:0" communicate waits [%x]\n'
    text = HEAD + X + Y + FEED + head + f"  {node}\n" + FETCH
    with pytest.raises(InternalError, match="waits for or signals x"):
        verify_plan(parse_plan(text).ranks[0])


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_fires(rule: str) -> None:
    (rank,) = parse_plan(BROKEN[rule]).ranks
    with pytest.raises(InternalError, match=f"breaks the rule {rule}"):
        verify_plan(rank)


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in PLAN_RULES} == set(BROKEN)


COLLECTIVES = {
    "all_reduce": '%y = all_reduce %x : float32[4] -> float32[{}] (comm=0, reduction="sum", bytes=8)',
    "all_gather": "%y = all_gather %x : float32[4] -> float32[{}] (comm=0, dim=0, sizes=[4, 3], bytes=8)",
    "reduce_scatter": (
        '%y = reduce_scatter %x : float32[4] -> float32[{}] (comm=0, reduction="sum", dim=0, sizes=[2, 2], bytes=8)'
    ),
}
RIGHT = {"all_reduce": 4, "all_gather": 7, "reduce_scatter": 2}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_pieces_of_collectives_add_up(kind: str) -> None:
    def plan(size: int) -> str:
        node = COLLECTIVES[kind].format(size)
        return HEAD + X + Y + FEED + f'actor 1 on "comm:0" communicate\n  {node}\n' + FETCH

    right, wrong = parse_plan(plan(RIGHT[kind])), parse_plan(plan(5))
    verify_communicators(right.ranks[0], right.communicators)
    with pytest.raises(InternalError, match=f"pieces of {kind} x"):
        verify_communicators(wrong.ranks[0], wrong.communicators)


def test_all_to_all_pieces_add_up() -> None:
    text = (
        HEAD.replace("rank 0", "rank 1")
        + "register %x : float32[3, 4] batch credits 2 from 0 to [1]\n"
        + "register %y : float32[7, 2] communication credits 1 from 1 to [2]\n"
        + FEED
        + 'actor 1 on "comm:0" communicate\n  %y = all_to_all %x : float32[3, 4] -> float32[7, 2] '
        + "(comm=0, dim=0, sizes=[4, 3], split_dim=1, split_sizes=[2, 2], bytes=8)\n"
        + FETCH
    )
    good = parse_plan(text)
    verify_communicators(good.ranks[0], good.communicators)
    bad = parse_plan(text.replace("split_sizes=[2, 2]", "split_sizes=[3, 2]"))
    with pytest.raises(InternalError, match="pieces of all_to_all"):
        verify_communicators(bad.ranks[0], bad.communicators)


def test_a_foreign_communicator_is_refused() -> None:
    node = COLLECTIVES["all_reduce"].format(4)
    text = HEAD + X + Y + FEED + f'actor 1 on "comm:0" communicate\n  {node}\n' + FETCH
    plan = parse_plan(text.replace("rank 0", "rank 5"))
    with pytest.raises(InternalError, match="not a member"):
        verify_communicators(plan.ranks[0], plan.communicators)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 3]", "[0, 2]"),  # the output is not filled
        ("[[3, 1]]", "[[4, 1]]"),  # outside of the output
        ("[1, [[1, 2]]]", "[1, [[3, 2]]]"),  # outside of the input
        ("[1, [[1, 2]]]", "[2, [[1, 2]]]"),  # no such peer
        ("sends=[[0, [[0, 3]]]", "sends=[[0, [[0, 2]]]"),  # leaves otherwise than it arrives
        ("[0, [[0, 3]]], [1, [[3, 1]]]", "[0, [[0, 3]]], [0, [[3, 1]]]"),  # two of one peer
    ],
)
def test_pieces_of_a_transfer_add_up(old: str, new: str) -> None:
    node = (
        "%y = transfer %x : float32[4] -> float32[4] (comm=0, sends=[[0, [[0, 3]]], [1, [[1, 2]]]], "
        "receives=[[0, [[0, 3]]], [1, [[3, 1]]]], bytes=12)"
    )
    text = (
        HEAD
        + X
        + "register %y : float32[4] communication credits 1 from 1 to [2]\n"
        + FEED
        + f'actor 1 on "comm:0" communicate\n  {node}\n'
        + FETCH
    )
    good = parse_plan(text)
    assert str(good) == text
    verify_communicators(good.ranks[0], good.communicators)
    assert old in text
    bad = parse_plan(text.replace(old, new))
    with pytest.raises(InternalError, match="pieces of transfer x"):
        verify_communicators(bad.ranks[0], bad.communicators)
