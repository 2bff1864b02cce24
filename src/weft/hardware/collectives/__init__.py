"""Seconds of communication on a topology: collectives of groups, and transfers between devices."""

from weft.hardware.collectives.link_uses import CollectiveLinks as CollectiveLinks
from weft.hardware.collectives.link_uses import TransferLinks as TransferLinks
from weft.hardware.collectives.pattern import BusyLinks as BusyLinks
from weft.hardware.collectives.seconds import collective_links as collective_links
from weft.hardware.collectives.seconds import collective_seconds as collective_seconds
from weft.hardware.collectives.seconds import transfer_links as transfer_links
from weft.hardware.collectives.seconds import transfer_seconds as transfer_seconds
