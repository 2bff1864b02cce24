"""Simulation of plans on machines that nobody has to have: how long steps take, why, and what ranks hold."""

from weft.simulator.planned import PlannedStep as PlannedStep
from weft.simulator.simulate import simulate as simulate
from weft.simulator.simulation import Simulation as Simulation
