"""The file of recorded choices."""

from pathlib import Path

import pytest

pytest.importorskip("cupy")

from kernels.cuda.runtime import choices


# Ranks that time a matmul at the same time, choose differently, and compute other bits after a resume.
def test_the_first_process_chooses_for_all(tmp_path: Path) -> None:
    path = tmp_path / "cuda" / "choices.json"
    assert choices.record(path, "a", {"candidate": 1}) == {"candidate": 1}
    assert choices.record(path, "b", {"candidate": 2}) == {"candidate": 2}
    assert choices.record(path, "a", {"candidate": 3}) == {"candidate": 1}
    assert choices.recorded(path) == {"a": {"candidate": 1}, "b": {"candidate": 2}}


# A choice that this library version does not offer would be kept for good.
def test_a_choice_of_no_use_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    old = choices.record(path, "a", {"candidate": 9})
    assert choices.record(path, "a", {"candidate": 3}, replaces=old) == {"candidate": 3}
    assert choices.record(path, "a", {"candidate": 4}, replaces=old) == {"candidate": 3}
