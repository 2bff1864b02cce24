"""Seconds of communication on a topology: collectives of groups, and transfers between devices."""

from weft.hardware.collectives.pattern import BusyLinks as BusyLinks
from weft.hardware.collectives.seconds import CollectiveLinks as CollectiveLinks
from weft.hardware.collectives.seconds import TransferLinks as TransferLinks
from weft.hardware.collectives.seconds import collective_seconds as collective_seconds
from weft.hardware.collectives.seconds import transfer_seconds as transfer_seconds
