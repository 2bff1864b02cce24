"""The record of a search: what it found and learned of a step on a machine, for the next one."""
