"""Lines of the server's log: JSON, each with the time and the name of what happened."""

from __future__ import annotations

import json
import logging
import sys
from time import time

logger = logging.getLogger("outpace.serve")


def say(event: str, **figures: object) -> None:
    """Write a line."""
    logger.info(json.dumps({"time": round(time(), 3), "event": event, **figures}))


class JSONFormatter(logging.Formatter):
    """Writes what others log as such lines too, so that a reader of the log needs one parser."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == logger.name and record.levelno == logging.INFO:
            return message
        said = {"time": round(record.created, 3), "event": record.levelname.lower(), "logger": record.name}
        said["message"] = message
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def write_to_stderr() -> None:
    """Have the lines, and what others log, written to standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JSONFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    logging.captureWarnings(True)
    logger.setLevel(logging.INFO)
