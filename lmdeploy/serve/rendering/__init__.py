"""Markdown, code and formulas as trees of elements, computed in another process with bounds."""
