"""Ranks that survive the loss of others go on in their processes, in a new world: the launcher leads, they follow."""
