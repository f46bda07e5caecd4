"""The README's figures."""

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.figures import loss_figure, pipeline_figure, read_curve, run


# A run of one update has one row: a curve without an extent must not divide by zero, and both files must be
# XML.
@pytest.mark.parametrize("steps", [1, 7, 20, 1400])
def test_figures_are_xml(steps: int) -> None:
    train = [(step, 6.0 - step / steps) for step in range(1, steps + 1)]
    for drawn in (loss_figure(train, [(steps, 5.1, 2.0)]), pipeline_figure()):
        root = ElementTree.fromstring(drawn)
        assert root.tag.endswith("svg")
        assert "nan" not in drawn and "inf" not in drawn


# A set or a clock in the drawing would give a new file, and a commit, for the same run.
def test_same_curves_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("docs")
    os.makedirs("data/pretrain/curves")
    Path("data/pretrain/curves/train.csv").write_text("step,loss,lr\n1,6.5,0\n2,4.25,0\n", encoding="utf-8")
    Path("data/pretrain/curves/val.csv").write_text("step,val_loss,val_bpb\n2,4.5,3.25\n", encoding="utf-8")
    drawn = []
    for _ in range(2):
        run([])
        drawn.append([path.read_bytes() for path in sorted(Path("docs").iterdir())])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 2
    assert b"3.250 bits per byte after 2 updates" in drawn[0][0]


# Before the first training there is no curve: the user must learn which command makes it.
def test_missing_curve_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.csv: no such file; `make repro`"):
        read_curve(tmp_path / "train.csv", ("step", "loss"))
    (tmp_path / "train.csv").write_text("step,loss\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected at least one row"):
        read_curve(tmp_path / "train.csv", ("step", "loss"))
