"""What files beside the vocabulary state about its tokens."""
