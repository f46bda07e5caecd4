"""Ctrl-C and SIGTERM during training: the run stops within a second or two, and no finished step is lost."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TypeVar

from kernels.ranks import Ranks

EXIT_CODE = 130  # as shells report Ctrl-C; for DVC only 0 is success
SAID = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}

Item = TypeVar("Item")


class Interrupted(BaseException):
    """Ends an interruptible block, whose work is then discarded. Not an Exception, so that no library catches
    it.
    """


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request to stop; a second one stops at once.

    Args:
        say: prints the line that confirms the request.
        raise_in_handler: whether the signal handler itself ends an interruptible block. On a GPU such a block
            may end only at `check`: CUDA may be capturing a graph.
        ranks: the ranks that stop together.
    """

    def __init__(self, say: Callable[[str], None], *, raise_in_handler: bool, ranks: Ranks) -> None:
        self.requested = False
        self._say, self._raise_in_handler, self._ranks, self._inside = (
            say,
            raise_in_handler and ranks.size == 1,
            ranks,
            False,
        )

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in SAID}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Interrupted if a stop was requested. All ranks call this together, and stop together."""
        self.requested = any(self._ranks.all_gather_object(self.requested))
        if self.requested:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block whose work is repeated after the resume if an interrupt ends it: in a single process on the
        CPU at any point, on a GPU or with several ranks at its next `check`.
        """
        if self._ranks.size == 1:
            self.check()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def checked(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items. Raises Interrupted before the next one if this process was asked to stop; unlike
        `check`, it does not ask the other ranks.
        """
        for item in items:
            if self.requested:
                raise Interrupted
            yield item

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        with suppress(
            RuntimeError, OSError
        ):  # another line is being printed right now, or nobody reads the output
            self._say(
                f"{SAID[signal.Signals(number)]}: saving the last finished step; a second one stops at once"
            )
        if self._inside and self._raise_in_handler:
            raise Interrupted
