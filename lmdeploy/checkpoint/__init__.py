"""Convert the files of a checkpoint to the weights of the engine."""
