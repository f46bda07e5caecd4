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
        cuts: whether the signal handler itself ends an interruptible block. On a GPU such a block may end
            only at `check`: CUDA may be capturing a graph.
        ranks: the ranks that stop together.
    """

    def __init__(self, say: Callable[[str], None], *, cuts: bool, ranks: Ranks) -> None:
        self.requested = False
        self._say, self._cuts, self._ranks, self._inside = say, cuts and ranks.size == 1, ranks, False

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._request) for number in SAID}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises Interrupted if a stop was requested. All ranks call this together, and stop together."""
        self.requested = any(self._ranks.gather(self.requested))
        if self.requested:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that an interrupt may end at any point; its work is repeated after the resume. With several
        ranks it runs to its next `check`.
        """
        if self._ranks.size == 1:
            self.check()
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def checked(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items of this rank, until a stop is requested here: raises Interrupted before the next."""
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
        if self._inside and self._cuts:
            raise Interrupted
