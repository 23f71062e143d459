"""Convert messages to token ids, and token ids back to text."""
