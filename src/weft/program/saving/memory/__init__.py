"""Snapshots: what a checkpoint holds, in the memory of two hosts, where it outlives the processes that wrote it."""
