"""Seconds of local calls, updates and exchanges, measured on the machine that runs."""
