"""Ctrl-C and SIGTERM during training: heard at once, answered within a second or two, and no finished step is lost."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TypeVar

EXIT_CODE = 130  # as a shell gives it after Ctrl-C; DVC takes only 0 for success
SAID = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

Item = TypeVar("Item")


class Interrupted(BaseException):
    """Ends the work of a section, of which nothing counts then. No Exception: no library may take it for its own."""


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request that sections of work answer; a second one stops at once.

    Args:
        say: where the line goes that tells the user that the request was heard.
        cuts: whether the handler itself ends a section. A section on a GPU must end at `check` alone: CUDA may be
            capturing a graph.
    """

    def __init__(self, say: Callable[[str], None], *, cuts: bool) -> None:
        self.requested = False
        self._say, self._cuts, self._inside = say, cuts, False

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in SAID}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Interrupted if the user asked for it."""
        if self.requested:
            raise Interrupted

    @contextmanager
    def section(self) -> Iterator[None]:
        """A block that may be left at any point, since what it has done is done again after the resume."""
        self.check()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def checked(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, with a check before each."""
        for item in items:
            self.check()
            yield item

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with suppress(
            RuntimeError, OSError
        ):  # another line is being printed just now, or its reader has gone
            self._say(
                f"{SAID[signal.Signals(number)]}: saving the last finished step; a second one stops at once"
            )
        if self._inside and self._cuts:
            raise Interrupted
