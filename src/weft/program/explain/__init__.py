"""What `Program.explain` says: what is sent, how much memory, what limits."""
