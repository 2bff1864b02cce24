"""Rules of weft's own ops that passes and capture put into graphs."""

from weft.ops.rules.own import class_split as class_split
from weft.ops.rules.own import experts as experts
from weft.ops.rules.own import passes as passes
