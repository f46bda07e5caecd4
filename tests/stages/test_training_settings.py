"""The sections of training stages: impossible numbers are refused."""

from collections.abc import Callable

import pytest

from stages.settings import Settings
from stages.trained_stages import TRAINED_STAGES

Make = Callable[..., Settings]
COUNTS = ("steps", "micro_batch", "grad_accum_steps", "val_every", "sample_every", "checkpoint_every")


# Would catch a number that no memory plan, step count or file name can hold, and a limit that refuses what
# they can.
@pytest.mark.parametrize("section", [stage.name for stage in TRAINED_STAGES])
@pytest.mark.parametrize("key", COUNTS)
def test_counts_have_an_upper_bound(settings_with: Make, section: str, key: str) -> None:
    for value in (2**31, 10**22):
        with pytest.raises(
            ValueError, match=rf"^{section}\.{key}: expected at least 1 and at most 2147483647, got {value}$"
        ):
            settings_with(f"{section}.{key}={value}")
    settings_with(f"{section}.{key}={2**31 - 1}")


# Would catch a warm-up or cool-down beyond every number of steps, and a seed that a sample's seed of 64 bits
# cannot hold.
def test_what_depends_on_counts_is_bounded_too(settings_with: Make) -> None:
    with pytest.raises(ValueError, match=r"^pretrain\.warmup_steps: expected 0 to pretrain\.steps = 6"):
        settings_with(f"pretrain.warmup_steps={10**22}")
    with pytest.raises(ValueError, match=r"^sft\.cooldown_steps: expected 0 to steps - warmup_steps = 5"):
        settings_with("sft.schedule=wsd", f"sft.cooldown_steps={10**22}")
    with pytest.raises(ValueError, match=r"^pretrain\.seed: expected at least 0 and below 2\*\*63"):
        settings_with(f"pretrain.seed={2**63}")
    settings_with(f"pretrain.seed={2**63 - 1}")
