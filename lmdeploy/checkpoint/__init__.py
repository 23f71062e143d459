"""Checkpoint files: find, open, check and convert them to the engine's weights."""
