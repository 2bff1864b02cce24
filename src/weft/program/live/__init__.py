"""The user's model, live: its parameters and buffers are the variables of programs."""
