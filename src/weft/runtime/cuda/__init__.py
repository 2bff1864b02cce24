"""Ranks on devices with streams: launches, copies, CUDA graphs."""
