"""Display and outputs of a run: correct figures, small files, no terminal needed."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from stages import metrics
from stages.metrics import (
    MAX_ROWS,
    LiveDisplay,
    PlainDisplay,
    Progress,
    Rows,
    Speed,
    TrainingHistory,
    add_row,
    duration,
    open_display,
    write_csv,
)


def progress(step: int, steps: int = 1000, val_bpb: float | None = 2.5) -> Progress:
    return Progress(step, steps, loss=3.25, total_loss=4.5, lr=1.5e-3, grad_norm=0.75, tokens_per_s=21034.4,
                    left_s=125.0, val_bpb=val_bpb)  # fmt: skip


def test_speed_is_that_of_an_undisturbed_step() -> None:
    """Would catch a figure that one slow step pulls down, and a time left that forgets validation or trusts
    the first step.
    """
    speed = Speed()
    assert speed.add(60.0) == 60.0
    assert speed.left_s(steps=100, here_s=60.0) is None
    for _ in range(3):
        speed.add(0.5)
    assert speed.add(0.5) == 0.5
    assert speed.left_s(steps=100, here_s=62.0) == 100 * 0.5
    assert speed.left_s(steps=100, here_s=67.0) == 100 * (0.5 + 5 / 5)


def test_plain_lines_are_few_and_hold_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a log of a line a step, a missing last step, and a figure left out of the line."""
    with PlainDisplay() as display:
        for step in range(1, 1001):
            display.update(progress(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= metrics.PLAIN_LINES + 2
    assert lines[0].startswith("step 1/1,000") and lines[-1].startswith("step 1,000/1,000")
    for figure in (
        "loss 3.2500",
        "lr 1.50e-03",
        "grad norm 0.750",
        "tokens/s 21,034",
        "left 2m 05s",
        "val bits/byte 2.5",
    ):
        assert figure in lines[-1]
    assert all(label != "left" for label, _ in replace(progress(1), left_s=None).cells())


def test_live_display_draws_every_figure_and_keeps_lines() -> None:
    """Would catch a display that fails before the first step or first validation, or takes [brackets] for
    markup.
    """
    out = io.StringIO()
    with LiveDisplay(
        "pretrain", Console(file=out, force_terminal=True, width=120, color_system=None)
    ) as display:
        display.say("sample: [/bold] [x]")
        display.update(progress(1, val_bpb=None))
        display.update(progress(500))
    for figure in (
        "sample: [/bold] [x]",
        "pretrain",
        "500/1,000",
        "3.2500",
        "1.50e-03",
        "0.750",
        "21,034",
        "2m 05s",
        "2.5000",
    ):
        assert figure in out.getvalue()


def test_no_terminal_means_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch escape sequences in a log file, and a display setting that is ignored."""
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(open_display("auto", "x"), PlainDisplay)
    assert isinstance(open_display("plain", "x"), PlainDisplay)
    assert isinstance(open_display("live", "x"), LiveDisplay)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.7, "1h 00m"), (7620, "2h 07m")]
)
def test_duration(seconds: float, text: str) -> None:
    """Would catch 60s, 59m 60s and hours without minutes."""
    assert duration(seconds) == text


def test_history_survives_json(tmp_path: Path) -> None:
    """Would catch curves that a resumed run loses or writes differently."""
    history = TrainingHistory(
        [(1, 3.5, 4.0, 1e-3, 0.5)], [(1, 3.25, 2.5)], [(1, "\u00fc\n\u2028")], [(1, 100.0)], 1.5, [7]
    )
    again = TrainingHistory(**json.loads(json.dumps(history.to_dict())))
    for number, each in enumerate((history, again)):
        each.write_curves(tmp_path / str(number))
        each.write_samples(tmp_path / str(number) / "samples.txt")
        each.write_speed(tmp_path / str(number) / "speed.csv")
    for name in ("train.csv", "val.csv", "samples.txt", "speed.csv"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
    assert (tmp_path / "0" / "val.csv").read_bytes() == b"step,val_loss,val_bpb\n1,3.25,2.5\n"
    assert (
        tmp_path / "0" / "train.csv"
    ).read_bytes() == b"step,loss,total_loss,lr,grad_norm\n1,3.5,4,0.001,0.5\n"
    assert (tmp_path / "0" / "speed.csv").read_bytes() == b"step,tokens_per_s\n1,100\n"
    assert (again.seconds, again.resumed_at) == (1.5, [7])


def curve(steps: int, rows: Rows | None = None) -> Rows:
    """Continues a curve up to a number of steps."""
    rows = [] if rows is None else rows
    for step in range(int(rows[-1][0]) + 1 if rows else 1, steps + 1):
        add_row(rows, (step, 1.0))
    return rows


@pytest.mark.parametrize("steps", [1, 2, 999, 1000, 1001, 1002, 1999, 2001, 2002, 4003, 10000])
def test_a_curve_depends_only_on_the_steps_done(steps: int) -> None:
    """Would catch a CSV of a line a step, which Git keeps; a first or newest step that is not shown; and a
    curve that a run of other steps, or a resumed one, has otherwise."""
    every = 1
    while steps // every > MAX_ROWS:
        every *= 2
    expected = sorted({1, steps, *range(every, steps + 1, every)})
    rows = curve(steps)
    assert [row[0] for row in rows] == expected and len(rows) <= MAX_ROWS + 2
    for stop in (1, 7, 998, 1001, 1502, 2001):
        if stop < steps:
            resumed = json.loads(json.dumps(curve(stop)))
            assert [row[0] for row in curve(steps, resumed)] == expected


def test_csv_numbers_are_short_and_exact_where_whole(tmp_path: Path) -> None:
    """Would catch steps rounded to six digits (1234567 -> 1.23457e+06) and floats of 17 digits in Git."""
    write_csv(tmp_path / "x.csv", ("step", "loss", "model"), [(1234567, 1 / 3, "base")])
    assert (tmp_path / "x.csv").read_bytes() == b"step,loss,model\n1234567,0.333333,base\n"


def test_provenance_names_versions_and_facts(tmp_path: Path) -> None:
    """Would catch a result that cannot be traced to the libraries and the device that made it."""
    metrics.write_provenance(
        tmp_path / "provenance.json", device="cpu", parameters={"take": Path("some/folder")}
    )
    found = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert (
        found["device"] == "cpu"
        and {"python", "numpy", "numba"} <= found["versions"].keys()
        and found["machine"]["platform"]
    )
