"""The one error of everything that reads model files."""


class ModelFormatError(ValueError):
    """A model path, file or setting that cannot be loaded; the message is one line for the user."""
