"""A few kills of tests/chaos.py and tests/rank_chaos.py; `make crash-test` does more."""

from pathlib import Path

import pytest

from tests import rank_chaos
from tests.chaos import chaos


# A stage that is killed must not leave what the next `dvc repro` stumbles over, trains on or takes for whole.
@pytest.mark.slow
def test_killed_four_times_gives_the_same_files(tmp_path: Path) -> None:
    lines: list[str] = []
    assert chaos(tmp_path, kills=4, seed=1, say=lines.append), "\n".join(lines)


# A rank that is killed must not leave the others waiting, a half-written state, or another result.
@pytest.mark.slow
def test_ranks_killed_four_times_give_the_same_files(tmp_path: Path) -> None:
    lines: list[str] = []
    assert rank_chaos.chaos(tmp_path, kills=4, seed=1, say=lines.append), "\n".join(lines)
