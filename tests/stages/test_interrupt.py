"""Ctrl-C and SIGTERM: confirmed at once; only sections are cut."""

import signal

import pytest

from kernels.ranks import ALONE, OneRank
from stages.interrupt import Interrupt, Interrupted


def silent(line: str) -> None:
    pass


# Would catch a user who does not know for minutes whether the key was heard, and a line that names the wrong
# signal.
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "Ctrl-C: saving"), (signal.SIGTERM, "SIGTERM: saving")]
)
def test_the_request_is_said_at_once(number: signal.Signals, said: str) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    with Interrupt(lines.append, raise_in_handler=True, ranks=OneRank(ALONE)) as interrupt:
        signal.raise_signal(number)
        assert len(lines) == 1 and lines[0].startswith(said) and interrupt.requested
    assert signal.getsignal(number) is before


# Would catch Ctrl-C that waits for a long micro-step, and an interrupted update of the weights.
def test_a_section_is_cut_and_nothing_else() -> None:
    with (
        Interrupt(silent, raise_in_handler=True, ranks=OneRank(ALONE)) as interrupt,
        pytest.raises(Interrupted),
        interrupt.interruptible(),
    ):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the section went on")
    with Interrupt(silent, raise_in_handler=True, ranks=OneRank(ALONE)) as interrupt:
        with interrupt.interruptible():
            pass
        signal.raise_signal(signal.SIGINT)  # between sections
        with pytest.raises(Interrupted), interrupt.interruptible():
            pytest.fail("another section began")


# Would catch an exception in the middle of a graph capture.
def test_on_a_gpu_a_section_ends_at_a_check_alone() -> None:
    seen = []
    with Interrupt(silent, raise_in_handler=False, ranks=OneRank(ALONE)) as interrupt:
        with interrupt.interruptible():
            signal.raise_signal(signal.SIGINT)
            seen.append("whole")
        with pytest.raises(Interrupted):
            interrupt.check()
    assert seen == ["whole"]


# Would catch a validation or a sample that Ctrl-C waits for: of a million batches none comes after it.
def test_items_are_checked_one_by_one() -> None:
    seen = []
    with (
        Interrupt(silent, raise_in_handler=False, ranks=OneRank(ALONE)) as interrupt,
        pytest.raises(Interrupted),
    ):
        for item in interrupt.checked(range(10**6)):
            seen.append(item)
            if item == 2:
                signal.raise_signal(signal.SIGINT)
    assert seen == [0, 1, 2]


# Would catch a program that cannot be stopped while a step hangs or a state is written to a slow disk.
def test_a_second_one_stops_at_once() -> None:
    with Interrupt(silent, raise_in_handler=False, ranks=OneRank(ALONE)), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


# Would catch a traceback instead of a saved step, if the signal arrives while a line is printed or nobody
# reads the output.
@pytest.mark.parametrize(
    "error", [RuntimeError("reentrant call inside <_io.BufferedWriter>"), BrokenPipeError()]
)
def test_a_line_that_cannot_be_printed_now_is_left_out(error: Exception) -> None:
    def busy(line: str) -> None:
        raise error

    with Interrupt(busy, raise_in_handler=True, ranks=OneRank(ALONE)) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
