"""What tests.bench.engine says of arguments that it cannot measure with."""

import sys

import pytest

from tests.bench import engine as bench


# A traceback, or a figure of nothing, in place of a line that names the option.
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --batch 0", "--batch, --seq and --steps begin at 1"),
        ("decode --steps 0", "--batch, --seq and --steps begin at 1"),
        ("ops --warmup -1", "--warmup at 0"),
        ("train --seq 129", "--seq: euler_1m takes 4 to 128, got 129"),
        ("train --seq 3", "--seq: euler_1m takes 4 to 128, got 3"),
        ("matmul --device cpu", "matmul is measured on a GPU only"),
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
