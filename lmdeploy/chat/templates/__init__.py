"""② Chat templates: how they are read, bounded and given messages."""
