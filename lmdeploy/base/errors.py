"""The error that all readers of model files raise."""

_MAX_CHARS = 600


class ModelFormatError(ValueError):
    """A model path, file or setting that cannot be loaded.

    The message may contain names from a hostile file, so it is always one printable line.
    """

    def __init__(self, message: str) -> None:
        line = "".join(char if char.isprintable() else "\ufffd" for char in message)
        super().__init__(line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]} ...")
