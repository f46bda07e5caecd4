"""How many ranks a stage gets, and which numbers of ranks a global batch allows."""

from kernels.devices import gpu_count
from stages.settings import Runtime
from stages.training_settings import Training


def available_ranks(runtime: Runtime) -> int:
    """The ranks that a stage without updates starts on this machine.

    Raises:
        ValueError: runtime.gpus is more than there are.
    """
    available = 0 if runtime.device == "cpu" else gpu_count()
    if runtime.gpus == "auto":
        return max(1, available)
    if runtime.gpus > max(1, available) and not runtime.plan:
        raise ValueError(
            f"runtime.gpus: expected auto or at most the {available} visible GPUs, got {runtime.gpus}"
        )
    return runtime.gpus


def training_rank_count(runtime: Runtime, training: Training) -> int:
    """The ranks that a training stage starts on this machine: with auto, as many GPUs as divide its
    micro-batches.

    Raises:
        ValueError: runtime.gpus is more than there are, or does not divide grad_accum_steps.
    """
    count = available_ranks(runtime)
    if runtime.gpus != "auto":
        check_divides(training, count)
        return count
    return max(ranks for ranks in range(1, count + 1) if training.grad_accum_steps % ranks == 0)


def unused_gpus_note(runtime: Runtime, training: Training) -> str:
    """A line about GPUs that runtime.gpus=auto leaves unused; empty if there are none."""
    used, count = training_rank_count(runtime, training), available_ranks(runtime)
    return "" if used == count else f"{used} of {count} GPUs are used; {_remedy(training, count)}"


def check_divides(training: Training, rank_count: int) -> None:
    """Each rank makes grad_accum_steps / rank_count micro-steps of an update.

    Raises:
        ValueError: this is no whole number; the message says what is.
    """
    if training.grad_accum_steps % rank_count:
        name = f"{training.section()}.grad_accum_steps"
        raise ValueError(
            f"{name}: expected a multiple of the {rank_count} ranks, got {training.grad_accum_steps}; "
            + _remedy(training, rank_count)
        )


def _remedy(training: Training, rank_count: int) -> str:
    """Settings for rank_count ranks with the same global batch. If there are none: the numbers of ranks that
    the present settings allow.
    """
    section, accum = training.section(), training.grad_accum_steps
    sequences = training.micro_batch * accum
    for steps in range(rank_count, sequences + 1, rank_count):
        if steps >= accum and sequences % steps == 0:
            return (
                f"the same batch for {rank_count}: {section}.micro_batch={sequences // steps} "
                f"{section}.grad_accum_steps={steps}"
            )
    divisors = [str(count) for count in range(1, accum + 1) if accum % count == 0]
    return f"a batch of {sequences} sequences allows {', '.join(divisors)} ranks with this micro_batch"
