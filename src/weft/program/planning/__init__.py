"""Plans of one program: for its batches, shapes and what the guards compare."""
