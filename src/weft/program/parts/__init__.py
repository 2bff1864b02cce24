"""The parts of a program, each with one task, which `Program` holds and calls; users call `Program` alone."""
