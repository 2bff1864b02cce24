"""Topology: a machine's devices and links as data, from the catalogue or a file of one's own."""

from weft.hardware.topology.machine import Topology as Topology
from weft.hardware.topology.reading import parse_topology as parse_topology
from weft.hardware.topology.reading import topologies as topologies
from weft.hardware.topology.reading import topology as topology
