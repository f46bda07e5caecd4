"""Which rank this process is, as its launcher says in environment variables.

    torchrun, or by hand    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun                    SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
    mpirun, mpiexec         OMPI_COMM_WORLD_..., PMI_...; the ranks are connected by MPI itself

Without any of them the process is alone, and may start others (stages/ranks/launch.py).
"""

import os
import re
from collections.abc import Mapping

from kernels.ranks import ALONE, Link, MpiLink
from stages.ranks.sockets import KEY, SocketLink

DEFAULT_PORT = 29500
# Number of ranks and local rank, as MPI's launchers say them.
MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "MPI_LOCALRANKID"),
)


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return _of_mpi(environment) is not None or _of_sockets(environment) is not None


def open_link(environment: Mapping[str, str] = os.environ) -> Link:
    """The link to the other ranks that the launcher started.

    Raises:
        ValueError: a variable is missing or wrong, or the ranks do not find each other.
    """
    if (found := _of_sockets(environment)) is not None:
        rank, size, local_rank, host, port = found
        key = environment.get(KEY, "nanoeuler").encode()
        return SocketLink(rank, size, local_rank, host=host, port=port, key=key)
    if (local_rank_name := _of_mpi(environment)) is not None:
        return MpiLink(_number(environment, local_rank_name, 0))
    return ALONE


def _of_mpi(environment: Mapping[str, str]) -> str | None:
    """The variable with the local rank, if an MPI launcher started several ranks."""
    for size, local_rank in MPI:
        if _number(environment, size, 1) > 1:
            return local_rank
    return None


def _of_sockets(environment: Mapping[str, str]) -> tuple[int, int, int, str, int] | None:
    """(rank, size, local rank, host, port), if torchrun or srun started several ranks."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names, default_host = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), ""
    elif "SLURM_STEP_NUM_TASKS" in environment:  # a batch script without srun has SLURM_PROCID, too
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        default_host = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    else:
        return None
    rank, size = _number(environment, names[0]), _number(environment, names[1])
    if size == 1:
        return None
    if not 0 <= rank < size:
        raise ValueError(f"{names[0]}: expected 0 to {names[1]} - 1 = {size - 1}, got {rank}")
    host = environment.get("MASTER_ADDR", default_host)
    if not host:
        raise ValueError("MASTER_ADDR: expected the address of the machine of rank 0, got nothing")
    job = _number(environment, "SLURM_JOB_ID", 0)
    port = _number(environment, "MASTER_PORT", DEFAULT_PORT + job % 10_000)
    if "TORCHELASTIC_RUN_ID" in environment:
        port += 1  # torchrun itself listens on MASTER_PORT
    return rank, size, _number(environment, names[2], rank), host, port


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    if not value.isdecimal():
        raise ValueError(f"{name}: expected a number, got {value!r}; every rank needs it in its environment")
    return int(value)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],login" gives "gpu07"."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return (found[1] + (found[2] or "")) if found else ""
