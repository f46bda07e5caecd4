"""Starts a stage once for each GPU of this machine, and ends all processes when one of them ends.

    python -m stages.ranks.launch 3 pretrain [key=value ...]     on CPUs, to try it: three ranks

The launcher forwards Ctrl-C and SIGTERM. Each rank reads a pipe from it, so that no rank outlives a launcher
that is killed.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from stages.ranks.sockets import KEY

LAUNCHED = "NANOEULER_LAUNCHED"  # set for ranks that this module started
GRACE_S = 5.0  # how long the other ranks may take to end when one has failed
POLL_S = 0.05


def launch(module: str, argv: Sequence[str], count: int) -> int:
    """Runs `python -m module argv` as `count` ranks on this machine.

    Returns:
        0 if all ranks succeeded, else the exit code of the first rank that failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        KEY: secrets.token_hex(), LAUNCHED: "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that the terminal's Ctrl-C comes once, from here
        )
        for rank in range(count)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(ranks)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks, for GRACE_S after a failure."""
    code, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        failed = [(number, rank.returncode) for number, rank in enumerate(ranks) if rank.poll()]
        if failed and not code:
            number, code = failed[0]
            deadline = time.monotonic() + GRACE_S
            if code < 0:
                print(f"rank {number} was ended by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)
    codes = [code, *(rank.returncode for rank in ranks)]
    found = next((one for one in codes if one), 0)
    return 1 if found is None or found < 0 else found


def end_with_launcher() -> None:
    """Ends this rank when its launcher is gone."""
    if LAUNCHED in os.environ:
        threading.Thread(target=_read_to_end, daemon=True).start()


def _read_to_end() -> None:
    os.read(0, 1)  # returns at the end of the pipe; sys.stdin would hold its lock while Python exits
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(launch(f"stages.{sys.argv[2]}", sys.argv[3:], int(sys.argv[1])))
