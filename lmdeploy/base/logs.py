"""Where lmdeploy's own messages go."""

from __future__ import annotations

import logging

from lmdeploy.base.checks import check_choice

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


def set_log_level(level: str) -> None:
    """Shows messages from `level` on. OptionError for a level that is none.

    Without any handler Python shows warnings alone: then they go to stderr.
    """
    check_choice("log_level", level, choices=LOG_LEVELS)
    logger = logging.getLogger("lmdeploy")
    logger.setLevel(level)
    if logger.level < logging.WARNING and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logger.addHandler(handler)
