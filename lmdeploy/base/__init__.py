"""Modules that every layer uses: checks, errors, files, logs and the machine's resources."""
