"""Quantization methods of checkpoints: one module per method."""
