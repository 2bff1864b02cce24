"""Texts with mistakes: what a careless or hostile hand makes of a file."""

from __future__ import annotations

import random
from collections.abc import Iterator

# What parsers fall over: depth, length, numbers, quotes, names of other things.
_JUNK = (
    "[" * 3000,
    "(" * 3000,
    "9" * 5000,
    "-" + "9" * 400,
    "1e999",
    "nan",
    "NaN",
    "Infinity",
    "None",
    "True",
    "\\u",
    '"',
    "'",
    "\0",
    "\ud7ff",
    "é",
    "٣",
    "²",
    "%x",
    "!SymInt:x",
    "@99",
    "#7",
    "receies=1",
    "lambda",
    "__class__",
    "",
    "\n",
    "{",
    "}",
    ":",
    "*",
    "&a [*a]",
    "2001-13-45",
    "!!python/name:os.system",
)


def mutated(text: str, count: int, seed: int = 0) -> Iterator[str]:
    """So many versions of a text, each with one to three mistakes.

    Args:
        text: that is right.
        count: of versions.
        seed: of what is drawn.
    """
    draw = random.Random(seed)
    for _ in range(count):
        found = text
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            found = _mistake(found, draw)
        yield found


def _mistake(text: str, draw: random.Random) -> str:
    """One token, line or character is replaced, left out, doubled or exchanged with another."""
    lines = text.splitlines()
    here, there = draw.randrange(len(lines) or 1), draw.randrange(len(lines) or 1)
    words = lines[here].split(" ") if lines else [""]
    word = draw.randrange(len(words))
    match draw.randrange(8):
        case 0:
            words[word] = draw.choice(_JUNK)
        case 1:
            words.insert(word, draw.choice(_JUNK))
        case 2:
            del words[word]
        case 3:
            other = lines[there].split(" ")
            words[word] = draw.choice(other)
        case 4:
            return "\n".join(lines[:here] + lines[here + 1 :])
        case 5:
            return "\n".join([*lines[:here], lines[there], *lines[here:]])
        case 6:
            place = draw.randrange(len(text) or 1)
            return text[:place] + draw.choice(_JUNK[:-4]) + text[place + draw.randrange(3) :]
        case _:
            digits = [i for i, letter in enumerate(lines[here]) if letter.isdigit()]
            if not digits:
                return text
            place = draw.choice(digits)
            changed = draw.choice(("0", "7", "-1", "99999999999", "1.5", "x"))
            words = (lines[here][:place] + changed + lines[here][place + 1 :]).split(" ")
    return "\n".join([*lines[:here], " ".join(words), *lines[here + 1 :]])
