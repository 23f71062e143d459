"""Checks, errors, files, logs and the machine's resources: modules that every layer uses."""
