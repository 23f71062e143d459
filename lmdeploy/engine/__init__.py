"""Load a model and run requests through the C++ engine."""
