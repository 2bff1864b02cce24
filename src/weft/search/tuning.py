"""The numbers that steer a search, each with the case that fails without it (`tests/search/test_tuning.py`).

None of them changes the time of a strategy: they decide the order of strategies, and how long to search.
"""

from __future__ import annotations

# Of estimates (`weft.search.estimate`).
#
# Part of a rank's compute behind which the exchange of gradients hides: the backward that follows the first of them.
HIDING = 0.5
# Part of a pipeline's bubble that counts where gradients of weights may be put off and fill the rest.
FILLED = 0.7
# Times as long as data parallel that layouts which deduction finds on two axes take, about: they are seldom better.
FREE = 1.1
# Times as long as estimated that samples which ranks do not divide, and kinds of which one was refused, may take.
UNKNOWN = 2.0
# Times as long as a plan of equal stages that one takes whose schedule is found by simulations.
COMPUTED = 1.6
# Part of the bytes kept for the backward that stays whole where layers are cut by columns and rows: what is between
# the layers, and the loss. A search with no time for small steps else plans what has no room.
BETWEEN = 0.4
# Times as many bytes as estimated that a pipeline may take.
STAGED = 1.1
# Estimates that differ by less than so many times are about the same: what lacks as little room may have it after all.
ABOUT = 1.25

# For the order (`weft.search.enumeration`).
#
# What small steps err by, and estimates without any: candidates that should take so many times as long as the best come
# before moves; until a plan like it was made, a first one must have room for so many times its bytes (the first).
LIKELY, LIKELY_UNSEEN = 1.05, 2.0
# So many plans lack room; then the candidate comes that takes the least memory.
FAILED = 3
# Times as long as the best that a candidate took in an earlier search which is not planned again.
SLOWER = 1.1

# Of moves (`weft.search.moves`).
#
# Part of the best step by which another may be longer and is kept by a chain with a probability of 1 / e.
TEMPERATURE = 0.02
# Moves after which a chain that has found nothing faster ends.
PATIENCE = 40
# Part of the best step by which one with stages may be longer where the best has none, or the other way, to be improved
# as well: a simulation errs alike about all pipelines. It has erred by as much on one host.
NEAR_STAGED = 0.5
# Part of the whole from which on something is worth moves: time that ranks of the best wait, what a part of the model
# holds or computes.
WORTH = 0.01
