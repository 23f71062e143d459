"""Rendering and tokenizing with limits of time and memory, for files that are not trusted."""
