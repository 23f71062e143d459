"""Configure the logger of lmdeploy."""

from __future__ import annotations

import logging

from lmdeploy.base.checks import check_choice

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


def set_log_level(level: str) -> None:
    """Log messages of `level` and above. Raise OptionError for an unknown level.

    Without a handler, Python would drop messages below WARNING, so they get one for stderr.
    """
    check_choice("log_level", level, choices=LOG_LEVELS)
    logger = logging.getLogger("lmdeploy")
    logger.setLevel(level)
    if logger.level < logging.WARNING and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger.addHandler(handler)
