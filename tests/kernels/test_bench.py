"""The messages of tests.bench.engine about invalid arguments."""

import sys

import pytest

from tests.bench import engine as bench


# Catches a traceback or an empty measurement instead of a line that names the option.
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --batch 0", "--batch, --seq and --steps must be at least 1"),
        ("decode --steps 0", "--batch, --seq and --steps must be at least 1"),
        ("ops --warmup -1", "--warmup at least 0"),
        ("train --seq 129", "--seq: euler_1m takes 4 to 128, got 129"),
        ("train --seq 3", "--seq: euler_1m takes 4 to 128, got 3"),
        ("matmul --device cpu", "matmul needs a GPU"),
        ("train --device cpu --precision bf16", "the CPU computes in fp32, got bf16"),
    ],
)
def test_wrong_arguments(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code
    assert said in f"{end.value.code} {capsys.readouterr().err}"
