"""Offline tools around the KV cache: calibration, search and reports."""
