"""Find the tokens that files beside the vocabulary state."""
