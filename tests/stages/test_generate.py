"""The command generate: its output, the end of a text, and its error messages."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import generate
from stages.checkpoint import load, save
from tests.stages.scripted_engine import CTRL_C, TOKENIZER, ScriptedEngine, ScriptedModel, ids, write_model

SEPARATOR = TOKENIZER.special["<|endoftext|>"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the pipeline has run, the current one."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    return tmp_path


def scripted(monkeypatch: pytest.MonkeyPatch, *answers: list[int], context: int = 64) -> ScriptedEngine:
    """The command with an engine that writes these ids."""
    engine = ScriptedEngine(context, list(answers))
    monkeypatch.setattr(generate, "open_model", lambda model, tokenizer_path: ScriptedModel(engine))
    return engine


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["generate", *argv])
    try:
        generate.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


# The model must read the separator before the prompt. The output contains the prompt; a special token ends it
# and is not shown.
def test_goes_on_with_the_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = scripted(monkeypatch, [*ids("MEO"), SEPARATOR])
    generate.run(["--prompt", "RO", "--temperature", "0"])
    assert engine.prompts == [[SEPARATOR, *ids("RO")]]
    assert capsys.readouterr().out == "ROMEO\n"


# Typed special tokens must stay text, or a prompt could end its own document.
def test_special_tokens_in_the_prompt_are_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = scripted(monkeypatch, [SEPARATOR])
    generate.run(["--prompt", "<|end|>{x}%s", "--temperature", "0"])
    assert engine.prompts[0][1:] == [TOKENIZER.encode(letter)[0] for letter in "<|end|>{x}%s"]
    assert capsys.readouterr().out == "<|end|>{x}%s\n"


# A prompt from a pipe is bytes: decoded with the locale's encoding, or stripped of its last newline, it is
# another one.
def test_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, [SEPARATOR])
    piped = b"\xc3\xa9\xff line\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="ascii"))
    generate.run(["--prompt", "-", "--temperature", "0"])
    assert engine.prompts == [[SEPARATOR, *TOKENIZER.encode(piped).tolist()]]


# Bytes of one character come in several tokens; half of one printed early is garbage on the screen.
def test_streams_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(generate, "show", shown.append)
    scripted(monkeypatch, [*ids("a\u20ac\U0001f600"), ids("\u20ac")[0], SEPARATOR])
    generate.run(["--temperature", "0"])
    assert [text for text in shown if text] == ["a", "\u20ac", "\U0001f600", "\ufffd\n"]


# Without --count's own seeds all texts are one; with another seed the same call must give others, with the
# same one the same.
def test_seeds(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def texts(*argv: str) -> list[str]:
        generate.run(["--max-tokens", "12", *argv])
        return capsys.readouterr().out.split("\n" + "-" * 40 + "\n")

    three = texts("--seed", "5", "--count", "3")
    assert len(set(three)) == 3
    assert three == texts("--seed", "5", "--count", "3")
    assert texts("--seed", "6")[0].rstrip("\n") == three[1]
    assert texts() != texts()


# The printed seed is what repeats a text whose seed was not given.
def test_banner_tells_model_and_seed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate.run(["--max-tokens", "9"])
    first = capsys.readouterr()
    assert first.err.startswith("pretrain model, context 32; CPU")
    assert "parameters" in first.err
    generate.run(
        ["--max-tokens", "9", "--seed", first.err.split()[-1], "--model", "data/pretrain/checkpoint"]
    )
    assert capsys.readouterr().out == first.out


# Generation must continue when the context is full.
def test_goes_on_beyond_the_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "abcdefghij" * 5
    scripted(monkeypatch, [*ids(text), SEPARATOR], context=16)
    generate.run(["--temperature", "0"])
    assert capsys.readouterr().out == text + "\n"


# What a user meets first is a missing model: the message has to say what makes it, in one line and without a
# traceback.
@pytest.mark.parametrize("missing", ["data/train_bpe/tokenizer.json", "data/sft/checkpoint/model.json"])
def test_missing_file_is_one_line(
    trained: Path, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / missing).unlink()
    assert run_main(monkeypatch, "--model", "sft") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: ")
    assert Path(missing).name in printed.err
    assert "make repro" in printed.err


# A tokenizer of another run gives fluent nonsense; it has to be refused.
def test_other_tokenizer_is_refused(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained / "data/pretrain/checkpoint"
    model = load(folder)
    save(folder, model.weights, model.config, "0" * 64)
    assert run_main(monkeypatch) == 1
    assert "tokenizer" in capsys.readouterr().err


# A bad value must be named before the model is loaded, which takes long for a large one.
@pytest.mark.parametrize(
    ("option", "value", "name"),
    [("--temperature", "-1", "temperature"), ("--top-p", "0", "top_p"), ("--count", "0", "count"),
     ("--max-tokens", "0", "max_tokens")],
)  # fmt: skip
def test_arguments_are_validated(
    option: str, value: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "open_model", None)
    assert run_main(monkeypatch, option, value) == 1
    assert capsys.readouterr().err.startswith(f"error: {name}: expected ")


# Drafts must not change the text, and their acceptance is reported; a model with one head cannot draft.
def test_speculative(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "--speculative") == 1
    assert capsys.readouterr().err.startswith(
        "error: speculative: expected a model with model.mtp_heads of at least 2"
    )
    write_model(tmp_path, mtp_heads=3)
    for temperature in ("0", "0.9"):
        texts = []
        for options in ([], ["--speculative"]):
            assert (
                run_main(
                    monkeypatch, "--temperature", temperature, "--seed", "5", "--max-tokens", "60", *options
                )
                == 0
            )
            texts.append(capsys.readouterr())
        assert texts[0].out == texts[1].out
        assert "tokens per pass" in texts[1].err
        assert "tokens per pass" not in texts[0].err


# --threads must reach the engine.
def test_threads(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "--threads", "1", "--max-tokens", "1") == 0
    assert ", 1 of " in capsys.readouterr().err
    assert run_main(monkeypatch, "--threads", "-1") == 1
    assert capsys.readouterr().err.startswith("error: runtime.threads: expected 0 (all) to ")


# A reader that closes the pipe, as `| head` does, is not an error.
def test_a_reader_that_goes(trained: Path) -> None:
    command = [sys.executable, "-m", "stages.generate", "--max-tokens", "500", "--temperature", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.read(1)
        run.stdout.close()
        assert len(run.stderr.read().splitlines()) == 1  # what writes


# Ctrl-C ends the command as a shell expects it, without a traceback.
def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(monkeypatch, [*ids("ab"), CTRL_C])
    assert run_main(monkeypatch, "--temperature", "0") == 130
    assert capsys.readouterr().out == "ab"


# An untrained model writes escape sequences as often as letters; on a terminal they would clear it or worse.
# Redirected output has to stay what was written.
def test_control_characters_stay_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2J\r\x9b\tb\n\u200d"
    generate.show(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate.show(text)
    assert capsys.readouterr().out == "a\ufffd[2J\ufffd\ufffd\tb\n\u200d"
