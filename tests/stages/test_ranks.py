"""How ranks are counted, started and connected, and how they end."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.ranks import ALONE
from stages.fingerprint import REPOSITORY
from stages.ranks import gpus, join
from stages.ranks.gpus import available_ranks, check_divides, training_rank_count, unused_gpus_note
from stages.ranks.join import first_host, is_rank, open_link
from stages.ranks.sockets import SocketLink
from stages.settings import Runtime
from tests.stages.small_training import SETTINGS

RUNTIME = Runtime(device="auto", gpus="auto", shard_optimizer=True, threads=0, display="plain", plan=False)
TRAINING = replace(SETTINGS, micro_batch=4, grad_accum_steps=6)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# GPUs left unused without a word, more ranks than GPUs, or a number that does not divide the batch.
def test_how_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, used in ((0, 1), (1, 1), (2, 2), (3, 3), (4, 3), (8, 6)):
        monkeypatch.setattr(gpus, "gpu_count", lambda visible=visible: visible)
        assert available_ranks(RUNTIME) == max(1, visible)
        assert training_rank_count(RUNTIME, TRAINING) == used
        assert bool(unused_gpus_note(RUNTIME, TRAINING)) == (used < visible)
        assert available_ranks(replace(RUNTIME, device="cpu")) == 1
    assert "training.micro_batch=3 training.grad_accum_steps=8" in unused_gpus_note(RUNTIME, TRAINING)
    with pytest.raises(ValueError, match=r"runtime\.gpus: .* at most the 8 visible GPUs, got 9"):
        available_ranks(replace(RUNTIME, gpus=9))
    assert available_ranks(replace(RUNTIME, gpus=9, plan=True)) == 9  # a plan may ask for other machines
    with pytest.raises(
        ValueError, match=r"training\.grad_accum_steps: expected a multiple of the 4 ranks, got 6"
    ):
        training_rank_count(replace(RUNTIME, gpus=4), TRAINING)


# A refusal whose advice is refused, too, or is another batch.
@pytest.mark.parametrize(
    ("micro_batch", "accum", "ranks"), [(4, 6, 4), (8, 1, 2), (3, 5, 2), (12, 1, 8), (1, 1, 2)]
)
def test_the_advice_works(micro_batch: int, accum: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="multiple of the") as refused:
        check_divides(replace(TRAINING, micro_batch=micro_batch, grad_accum_steps=accum), ranks)
    said = str(refused.value)
    if "the same batch" in said:
        found = {key: int(value) for key, value in re.findall(r"training\.(\w+)=(\d+)", said)}
        fixed = replace(
            TRAINING, micro_batch=found["micro_batch"], grad_accum_steps=found["grad_accum_steps"]
        )
        assert fixed.micro_batch * fixed.grad_accum_steps == micro_batch * accum
        check_divides(fixed, ranks)
    else:
        assert micro_batch * accum % ranks and "allows 1" in said


# A launcher's variables that are not seen: every process would train alone and write the same files. A batch
# script of SLURM that takes itself for a rank would wait for others for ever.
def test_environments() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    step = {**batch, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]"}
    for environment, expected in (
        ({}, False),
        (torchrun, True),
        ({**torchrun, "RANK": "0", "WORLD_SIZE": "1"}, False),
        (batch, False),
        (step, True),
        ({**step, "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, False),
        ({"PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "2"}, True),
    ):
        assert is_rank(environment) == expected, environment
    assert open_link({}) is ALONE and open_link(batch) is ALONE
    for broken, message in (
        ({"WORLD_SIZE": "4"}, "RANK: expected a number"),
        ({**torchrun, "RANK": "4"}, "RANK: expected 0 to WORLD_SIZE - 1 = 3, got 4"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: expected the address"),
        ({**torchrun, "MASTER_PORT": "http"}, "MASTER_PORT: expected a number, got 'http'"),
    ):
        with pytest.raises(ValueError, match=message):
            open_link(broken)


# torchrun listens on MASTER_PORT itself: rank 0 could not. SLURM gives no port: jobs on one machine need
# different ones.
def test_ports() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}
    step = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    assert join._of_sockets(by_hand) == (1, 2, 0, "a", 29400)
    assert join._of_sockets({**by_hand, "TORCHELASTIC_RUN_ID": "x"}) == (1, 2, 0, "a", 29401)
    assert join._of_sockets({**step, "SLURM_JOB_ID": "20007"}) == (3, 4, 1, "n1", 29507)


def test_first_host() -> None:
    """Would catch a rank that connects to a machine that is not rank 0's."""
    names = {"gpu07": "gpu07", "gpu[07-09,12],login": "gpu07", "a1,b2": "a1", "n-[1,3]": "n-1", "": ""}
    assert {nodes: first_host(nodes) for nodes in names} == names


# Values that reach another rank, in another order, or twice; large ones that block both sides.
def test_exchange() -> None:
    port, size = free_port(), 3

    def run(rank: int) -> list[Any]:
        link = SocketLink(rank, size, rank, host="127.0.0.1", port=port, key=b"key")
        small = link.exchange([f"{rank} to {to}" for to in range(size)])
        large = link.exchange([np.full(300_000, rank * 10 + to) for to in range(size)])
        link.close()
        return [small, [int(array[-1]) for array in large]]

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    for rank in range(size):
        assert found[rank] == [
            [f"{sender} to {rank}" for sender in range(size)],
            [sender * 10 + rank for sender in range(size)],
        ]


PROGRAM = """
import os, sys, time
from stages.ranks.sockets import SocketLink
rank, size, port, how = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
link = SocketLink(rank, size, rank, host="127.0.0.1", port=port, key=sys.argv[5].encode())
link.note = "last saved step: 40"
link.exchange([None] * size)
if how == "error":
    link.fail("the disk is full")
    raise SystemExit(1)
if how == "exit":
    os._exit(3)
if how == "done":
    link.close()
    raise SystemExit(0)
time.sleep(60)  # as in a collective that waits for the others
"""


def ranks_of(ways: list[str], keys: list[str] | None = None) -> tuple[list[int], list[str], float]:
    """Exit codes, what each rank says, and the seconds until all have ended, of ranks that end in these
    ways.
    """
    port, begun = str(free_port()), time.monotonic()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(len(ways)), port, way, (keys or ["k"] * 9)[rank]],
            cwd=REPOSITORY, stderr=subprocess.PIPE, text=True,
        )
        for rank, way in enumerate(ways)
    ]  # fmt: skip
    said = [process.communicate(timeout=30)[1] for process in started]
    return [process.returncode for process in started], said, time.monotonic() - begun


# A rank that waits for one that has ended, an error that nobody tells, or that everyone does.
@pytest.mark.parametrize(
    ("ways", "speaker", "message"),
    [
        (["wait", "error", "wait"], 0, "error: rank 1: the disk is full; last saved step: 40"),
        (["wait", "wait", "exit"], 0, "error: rank 2 has ended without a message"),
        (["exit", "wait", "wait"], 1, "error: rank 0 has ended without a message"),
        (["error", "wait", "wait"], 0, "error: the disk is full; last saved step: 40"),
        (["error", "error", "error"], 0, "error: the disk is full"),
    ],
)
def test_one_end_is_the_end_of_all(ways: list[str], speaker: int, message: str) -> None:
    codes, said, seconds = ranks_of(ways)
    assert 0 not in codes and seconds < 15
    assert message in said[speaker]
    assert "".join(said).count("error:") == 1, said


# A rank that ends before the others is no error.
def test_all_end_well() -> None:
    codes, said, _ = ranks_of(["done", "done", "done"])
    assert codes == [0, 0, 0] and said == ["", "", ""]


# A process of another run, or of a stranger, that gets to send objects.
def test_a_wrong_key_does_not_connect() -> None:
    port = free_port()
    command = [sys.executable, "-c", PROGRAM]
    first = subprocess.Popen([*command, "0", "2", str(port), "done", "right"], cwd=REPOSITORY)
    stranger = subprocess.run(
        [*command, "1", "2", str(port), "done", "wrong"], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert stranger.returncode == 1
    assert "ValueError: NANOEULER_KEY: expected the key of rank 0" in stranger.stderr.splitlines()[-1]
    friend = subprocess.run(
        [*command, "1", "2", str(port), "done", "right"], cwd=REPOSITORY, timeout=30, check=False
    )
    assert friend.returncode == first.wait(30) == 0


# A rank that outlives its launcher keeps a GPU busy; one that survives Ctrl-C does, too.
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_launcher(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom stages.ranks.launch import end_with_launcher\n"
        "end_with_launcher()\nPath(os.environ['RANK']).write_text(str(os.getpid()))\n"
        "import time; time.sleep(60)"
    )
    (tmp_path / "stages").mkdir()
    launcher = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from stages.ranks import launch as module; "
        f"module.sys.executable, real = {sys.executable!r}, module.subprocess.Popen\n"
        f"module.subprocess.Popen = lambda command, **kind: real([command[0], '-c', {code!r}], **kind)\n"
        "raise SystemExit(module.launch('pretrain', [], 2))"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=tmp_path, env=environment)
    files, deadline = [tmp_path / "0", tmp_path / "1"], time.monotonic() + 30
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(15)
    while any(Path(f"/proc/{file.read_text()}").exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{file.read_text()}").exists() for file in files)
