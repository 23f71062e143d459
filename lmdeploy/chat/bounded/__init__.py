"""Tokenizing with bounds on time and memory, for files whose settings are not known to be fast."""
