"""The link of ranks over TCP: for GPUs, whose large arrays go through NCCL, and for CPUs without MPI.

Rank 0 listens, and every other rank connects to it twice. One connection carries `exchange`. On the other one
a thread waits for the end of the process at its other side. So a rank that is killed, or whose machine
fails, ends all others within seconds, even if they wait for it inside NCCL.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from kernels.ranks import OTHER_ERROR_DELAY_S, RankLost, print_error

CONNECT_S = 600.0  # how long a rank waits for rank 0, and rank 0 for the others
END_S = 10.0  # how long a failed rank waits to be ended by rank 0
# Seconds without traffic before the first probe, seconds between probes, and lost probes that end it.
KEEPALIVE = (3, 1, 3)
DONE = "done"
KEY = "NANOEULER_KEY"  # the environment variable with the key
DIED = "has ended without a message: killed, or out of memory?"


class SocketLink:
    """See kernels.ranks.Link.

    Args:
        rank, size, local_rank: of this process.
        host, port: where rank 0 listens.
        key: known to all ranks of a run only. A process that does not know it cannot connect.

    Raises:
        ValueError: the other ranks did not come in time, or the port is taken.
    """

    def __init__(self, rank: int, size: int, local_rank: int, *, host: str, port: int, key: bytes) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.note = ""
        self._done = False
        self._data, self._watch = (self._accept if rank == 0 else self._connect)(host, port, key)
        for connection in (*self._data.values(), *self._watch.values()):
            _keep_alive(connection)
        threading.Thread(target=self._wait_for_ends, daemon=True).start()

    def exchange(self, values: Sequence[Any]) -> list[Any]:
        """See kernels.ranks.Link. Rank 0 distributes what all send."""
        try:
            if self.rank:
                self._data[0].send(list(values))
                return list(self._data[0].recv())
            sent = [list(values), *(self._data[rank].recv() for rank in range(1, self.size))]
            for rank in range(1, self.size):
                self._data[rank].send([one[rank] for one in sent])
            return [one[0] for one in sent]
        except (EOFError, OSError):
            time.sleep(END_S)  # the thread knows more, and ends this process
            raise RankLost(f"rank {self.rank} has lost its connection") from None

    def fail(self, error: str) -> None:
        """Report an error of this rank to rank 0, which prints it and ends all."""
        if self.rank == 0:
            print_error(error, self.note)
        for connection in self._watch.values():
            with suppress(OSError):
                connection.send(error)
        if self.rank:
            time.sleep(END_S)  # until rank 0 ends this process

    def close(self) -> None:
        """End without an error."""
        self._done = True
        for connection in self._watch.values():
            with suppress(OSError):
                connection.send(DONE)

    def _accept(
        self, host: str, port: int, key: bytes
    ) -> tuple[dict[int, Connection], dict[int, Connection]]:
        found: dict[str, dict[int, Connection]] = {"data": {}, "watch": {}}
        address = (host if _is_loopback(host) else "", port)
        try:
            listener = Listener(address, backlog=2 * self.size, authkey=key)
        except OSError as error:
            raise ValueError(
                f"MASTER_PORT: rank 0 cannot listen on {host}:{port}: {error.strerror}"
            ) from None
        timer = threading.Timer(CONNECT_S, self._give_up, [found])
        timer.daemon = True  # it must not keep a process alive that is interrupted here
        timer.start()
        with listener:
            while len(found["watch"]) < self.size - 1 or len(found["data"]) < self.size - 1:
                try:
                    connection = listener.accept()
                    rank, size, kind = connection.recv()
                except (AuthenticationError, EOFError, OSError):
                    continue  # a stranger, or a rank that ended again
                if size != self.size or not 0 < rank < self.size or rank in found[kind]:
                    raise ValueError(
                        f"RANK, WORLD_SIZE: expected one process for each of the ranks 1 to {self.size - 1} "
                        f"of {self.size}, got rank {rank} of {size}"
                    )
                found[kind][rank] = connection
        timer.cancel()
        return found["data"], found["watch"]

    def _connect(
        self, host: str, port: int, key: bytes
    ) -> tuple[dict[int, Connection], dict[int, Connection]]:
        deadline, found = time.monotonic() + CONNECT_S, []
        for kind in ("data", "watch"):
            while True:
                try:
                    connection = Client((host, port), authkey=key)
                    break
                except AuthenticationError:
                    raise ValueError(
                        f"{KEY}: expected the key of rank 0 at {host}:{port}, got another"
                    ) from None
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise ValueError(
                            f"MASTER_ADDR, MASTER_PORT: rank {self.rank} found no rank 0 at {host}:{port} in "
                            f"{CONNECT_S:.0f} s: {error.strerror}"
                        ) from None
                    time.sleep(0.1)
            connection.send((self.rank, self.size, kind))
            found.append({0: connection})
        return found[0], found[1]

    def _give_up(self, found: dict[str, dict[int, Connection]]) -> None:
        missing = sorted(set(range(1, self.size)) - found["watch"].keys())
        self._end(f"of {self.size} ranks, {missing} did not connect in {CONNECT_S:.0f} s")

    def _wait_for_ends(self) -> None:
        """Ends this process when another one has ended with an error."""
        open_ranks: dict[Any, int] = {connection: rank for rank, connection in self._watch.items()}
        while open_ranks:
            for connection in wait(list(open_ranks)):
                try:
                    said = str(connection.recv())  # type: ignore[union-attr, call-arg]
                except (EOFError, OSError):
                    said = ""
                if said == DONE:
                    del open_ranks[connection]
                elif not self._done:
                    self._lost(open_ranks[connection], said)
                else:
                    return

    def _lost(self, rank: int, said: str) -> None:
        if self.rank == 0:
            time.sleep(OTHER_ERROR_DELAY_S)
            text = f"rank {rank}: {said}" if said else f"rank {rank} {DIED}"
            for connection in self._watch.values():
                with suppress(OSError):
                    connection.send(text)
            self._end(text)
        # Rank 0 has printed every message that it sends. If rank 0 itself died, rank 1 prints that.
        self._end(f"rank 0 {DIED}" if self.rank == 1 and not said else "")

    def _end(self, error: str) -> None:
        """Ends the process from the thread. The main thread may wait inside NCCL, where no exception
        reaches.
        """
        if error and not self._done:
            print_error(error, self.note)
        os._exit(1)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _keep_alive(connection: Connection) -> None:
    """Detect a machine that is gone without a word."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), KEEPALIVE, strict=True):
            if hasattr(socket, name):
                copy.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
