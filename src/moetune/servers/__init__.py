"""One module for each server: all that differs by server or version, and nothing else."""
