"""Errors that several packages raise."""

_MAX_CHARS = 600


class ModelFormatError(ValueError):
    """A model path, file or setting that cannot be loaded.

    The message may contain names from a hostile file, so it is always one printable line.
    """

    def __init__(self, message: str) -> None:
        line = "".join(char if char.isprintable() else "\ufffd" for char in message)
        super().__init__(line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]} ...")


class UnavailableError(RuntimeError):
    """A part of the server that cannot serve a request now. The same request may succeed later."""


class EngineFailure(RuntimeError):
    """The engine has failed, is closed, or belongs to another process."""
