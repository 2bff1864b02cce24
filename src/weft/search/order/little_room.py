"""Room that is lacking a little: up to how many times its room a point may take, and is not given up.

One idea, by how well the bytes of the point are known. Up to that it may have room after all, or blocks that run again
may give it; so it stands behind others by what it lacks, not behind all. With such points behind all others 5 of 33
searches under tight limits ended slower than by hand, by up to 15 %; with these factors 2 of 21, by 0.8 % at most.
"""

from __future__ import annotations

# By a rough estimate: that was 0.87 to 1.33 times what plans take, of 32 points of two decoders. Chosen by hand below
# the most of these, since one that lacks more is seldom the one that is looked for.
ROUGHLY = 1.25
# By small steps, of points without stages: these hold to a hundredth, so that what lacks room lacks it.
BY_SMALL_STEPS = 1.0
# The same of pipelines, by their point without stages: to a tenth, in several turns to a half, so about as rough.
IN_STAGES = ROUGHLY
# By its own plan, which is exact: only blocks that run again help then. Chosen by hand: some of them give a tenth.
BY_ITS_PLAN = 1.1
