"""Trains the packaged performance model; nothing here ships."""
