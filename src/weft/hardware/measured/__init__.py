"""Costs that were measured on a machine: the figures, their file, and the seconds that follow from them."""

from weft.hardware.measured.costs import MeasuredCosts as MeasuredCosts
from weft.hardware.measured.figures import Measurements as Measurements
from weft.hardware.measured.figures import Roofline as Roofline
from weft.hardware.measured.figures import Sample as Sample
from weft.hardware.measured.figures import SizedSample as SizedSample
from weft.hardware.measured.figures import from_json as from_json
from weft.hardware.measured.figures import on_line as on_line
from weft.hardware.measured.figures import settled as settled
from weft.hardware.measured.figures import to_json as to_json
