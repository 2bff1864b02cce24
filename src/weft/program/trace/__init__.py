"""Traces: when acts ran, what queues waited for, and where the time of a step went."""

from weft.program.trace.trace import Trace as Trace
from weft.program.trace.trace import gather_trace as gather_trace
