"""The least sum of work and boxing over all axes of a grid at once."""
