"""Tools for the KV cache of a model: calibration, format search and report."""
