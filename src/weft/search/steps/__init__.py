"""Facts of a step that is searched: its repeated blocks, linear layers, exchanges, and smaller steps like it."""
