"""Loads models and runs requests in the C++ engine."""
