"""The systems that are compared: each trains a work in its own way, one process for each rank."""
