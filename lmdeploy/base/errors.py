"""The one error of everything that reads model files."""

_MAX_CHARS = 600


class ModelFormatError(ValueError):
    """A model path, file or setting that cannot be loaded.

    Names in the message may come from a hostile file: it is always one printable line.
    """

    def __init__(self, message: str) -> None:
        line = "".join(char if char.isprintable() else "\ufffd" for char in message)
        super().__init__(line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]} ...")
