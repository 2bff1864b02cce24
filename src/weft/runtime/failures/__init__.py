"""The ways in which ranks learn that another failed, waits for ever, or does something else."""
