"""Tools around a model: calibration, and the search for a table of cache formats."""
