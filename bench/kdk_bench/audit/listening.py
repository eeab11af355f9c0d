"""Libraries that take a slow path say so in a warning or a log line, if at all: these are caught and named."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

SLOW = "a slow reference path"
WORDS = re.compile(
    r"fall(s|ing)? ?back|reference (py)?torch|slow(er)? (path|implementation|version)|is not (available|installed).*(fast|kernel)", re.I
)


class _Handler(logging.Handler):
    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard(record.getMessage())


@contextlib.contextmanager
def listening(note: Callable[[str], Any]) -> Iterator[None]:
    """Call `note` with what libraries say about slow paths, in warnings and in the logs of their packages."""

    def heard(text: str) -> None:
        if WORDS.search(text):
            note(text.strip().splitlines()[0][:200])

    handler = _Handler(heard)
    loggers = [logging.getLogger(name) for name in ("", "transformers", "diffusers")]
    show = warnings.showwarning

    def shown(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
        heard(str(message))
        show(message, category, filename, lineno, file, line)

    for logger in loggers:
        logger.addHandler(handler)
    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show
        for logger in loggers:
            logger.removeHandler(handler)
