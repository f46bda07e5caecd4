"""The command chat: what the model reads and writes, what the commands change, what Ctrl-C stops."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.generation import Sampling
from stages import chat
from stages.chat import Chat, converse, reply, run_command
from stages.chat_template import render_prompt
from stages.trained_model import open_model
from tests.stages.scripted_engine import (
    CTRL_C,
    END,
    TOKENIZER,
    ScriptedEngine,
    ScriptedModel,
    ids,
    write_model,
)

GREEDY = Sampling(temperature=0)
USER, ASSISTANT = TOKENIZER.special["<|user|>"], TOKENIZER.special["<|assistant|>"]


def talk(*answers: list[int], context: int = 64, max_tokens: int = 100) -> tuple[Chat, ScriptedEngine]:
    """A chat with an engine that writes these ids."""
    engine = ScriptedEngine(context, list(answers))
    return Chat(engine, TOKENIZER, GREEDY, max_tokens), engine  # type: ignore[arg-type]


def says(text: str) -> list[int]:
    """An answer that ends by itself."""
    return [*ids(text), END]


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Standard input that is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="ascii"))


def inputs(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What input() gives or raises, one after the other; then the end."""
    pending = [*lines, EOFError]

    def read(prompt: str) -> str:
        line = pending.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


# The model must read the whole conversation in the template it was trained with. Braces, percent signs and
# typed special tokens in a message are plain text.
def test_reads_the_conversation_by_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    one, engine = talk(says("Yes."), says("No."))
    assert reply(one, "<|end|>{0}%d") == "model"
    assert reply(one, "b") == "model"
    first = [USER, *[ids(letter)[0] for letter in "<|end|>{0}%d"], END, ASSISTANT]
    assert engine.prompts == [first, [*first, *says("Yes."), USER, *ids("b"), END, ASSISTANT]]
    assert capsys.readouterr() == ("Yes.\nNo.\n", "")


# A special token in an answer would look like another speaker, also to the model. If it is the most likely
# token, the next is taken.
def test_special_tokens_never_in_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    one, engine = talk([USER, *ids("a"), ASSISTANT, END], says("b"))
    reply(one, "?")
    assert capsys.readouterr().out == "!a!\n", "the first of the equally likely ids is the exclamation mark"
    reply(one, "?")
    assert engine.prompts[1].count(USER) == 2


# A part of a character on the screen is garbage; a complete one must not be delayed.
def test_streams_whole_characters() -> None:
    one, _ = talk([*ids("a\u20ac\U0001f600b"), ids("\u20ac")[0], END])
    shown: list[str] = []
    assert one.answer(one.truncate_history("?")[0], shown.append) == "model"
    assert [text for text in shown if text] == ["a", "\u20ac", "\U0001f600", "b", "\ufffd"]
    assert one.messages[-1]["content"] == "a\u20ac\U0001f600b", (
        "the mark of a broken character is no part of the conversation"
    )


# Ctrl-C must end only the answer: the program continues, and the answer so far stays in the conversation.
def test_ctrl_c_stops_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, engine = talk([*ids("Well"), CTRL_C], says("Go on."))
    inputs(monkeypatch, "first", "second")
    converse(one)
    printed = capsys.readouterr()
    assert printed.out == "Well\nGo on.\n"
    assert printed.err == "(stopped)\n"
    assert [message["content"] for message in one.messages] == ["first", "Well", "second", "Go on."]
    assert engine.prompts[1] == render_prompt(one.messages[:3], TOKENIZER).tolist()


# Ctrl-C before the first question must not exit either; the end of the input and /exit do.
def test_leaving(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = talk(says("Yes."))
    inputs(monkeypatch, KeyboardInterrupt, "", "  ", "first", "/exit", "second")
    converse(one)
    printed = capsys.readouterr()
    assert printed.out == "Yes.\n"
    assert "Ctrl-D" in printed.err
    inputs(monkeypatch)
    converse(one)


# A full context must lose whole turns: the model was never trained on half a turn.
def test_oldest_turns_are_left_out_whole(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [says("1234"), says("5678"), says("90")]
    one, engine = talk(
        *answers, context=40, max_tokens=10
    )  # a prompt of up to 30 tokens; a turn of 4 + 4 takes 12
    for question in ("abcd", "efgh", "ijkl"):
        reply(one, question)
    assert len(engine.prompts[1]) == 12 + 7
    assert engine.prompts[2] == render_prompt(one.messages[:3], TOKENIZER).tolist()
    assert [message["content"] for message in one.messages] == ["efgh", "5678", "ijkl", "90"]
    assert capsys.readouterr().err == "(the context is full: the oldest 1 turn dropped)\n"


# A long question leaves less room for its answer; the answer is cut, but the question is not refused.
def test_long_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = talk(says("a"), [*ids("abcdef")], says("a"), context=20)
    reply(one, "1")
    assert reply(one, "x" * 13) == "context"  # and <|user|>, <|end|>, <|assistant|>: 4 of 20 are left
    assert capsys.readouterr().out == "a\nabcd\n"
    inputs(monkeypatch, "x" * 17, "1")
    converse(one)
    printed = capsys.readouterr()
    assert printed.err.startswith("error: this message takes 20 of 20 tokens")
    assert printed.out == "a\n", "the conversation goes on after the refusal"


# An answer that is cut at max_tokens must say so, or it looks like a sentence the model broke off.
def test_max_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = talk(ids("abcdef"), ids("ab"), max_tokens=4)
    assert reply(one, "?") == "max_tokens"
    printed = capsys.readouterr()
    assert printed.out == "abcd\n"
    assert "max_tokens = 4" in printed.err


# Each command changes its setting; an invalid value must change nothing and name the setting.
def test_commands_change_settings() -> None:
    one, _ = talk()
    for command in ("/temperature 0.7", "/top_k 7", "/top_p  0.9", "/seed 3", "/max_tokens 11"):
        run_command(one, command)
    assert one.sampling == Sampling(temperature=0.7, top_k=7, top_p=0.9, seed=3)
    assert one.max_tokens == 11
    assert (
        run_command(one, "/show")
        == "temperature 0.7, top_k 7, top_p 0.9, seed 3, max_tokens 11; 0 turns, 0 of 64 tokens"
    )
    before = one.describe()
    for command in (
        "/temperature -1",
        "/temperature",
        "/temperature x",
        "/top_k 1.5",
        "/top_p 0",
        "/seed -1",
        "/max_tokens 0",
    ):
        with pytest.raises(ValueError, match=f"^{command[1:].split()[0]}: expected .*, got "):
            run_command(one, command)
        assert one.describe() == before


# /help must list every command; a mistyped command must not be answered as a message.
def test_help_and_unknown_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, engine = talk()
    for name in (*chat.SETTINGS, "show", "reset", "exit"):
        assert f"/{name} " in run_command(one, "/help")
    inputs(monkeypatch, "/temprature 1", "/")
    converse(one)
    assert capsys.readouterr().err.startswith(
        "error: /temprature: no such command; /help lists the commands\n"
    )
    assert engine.prompts == []


# After /reset the model must not read earlier messages.
def test_reset() -> None:
    one, engine = talk(says("a"), says("b"))
    reply(one, "first")
    run_command(one, "/reset")
    reply(one, "second")
    assert engine.prompts[1] == render_prompt([{"role": "user", "content": "second"}], TOKENIZER).tolist()


SYSTEM = [TOKENIZER.special["<|system|>"], *ids("Be brief."), END]


# The system message must not be dropped with the oldest turns.
def test_system_message_stays(capsys: pytest.CaptureFixture[str]) -> None:
    one, engine = talk(*[says("ok")] * 6, context=40, max_tokens=4)
    assert run_command(one, "/system Be brief.") == "new conversation, with this system message"
    for letter in "abcd":
        reply(one, letter * 5)
    assert "the context is full: the oldest" in capsys.readouterr().err
    assert all(prompt[: len(SYSTEM)] == SYSTEM and prompt.count(SYSTEM[0]) == 1 for prompt in engine.prompts)
    assert all(len(prompt) <= 40 - 4 for prompt in engine.prompts)
    assert len(engine.prompts[1]) > len(engine.prompts[0]) and "system message 'Be brief.'" in run_command(
        one, "/show"
    )
    run_command(one, "/reset")
    reply(one, "e")
    assert engine.prompts[-1] == [*SYSTEM, USER, *ids("e"), END, ASSISTANT]
    assert run_command(one, "/system") == "new conversation, without a system message"
    reply(one, "f")
    assert engine.prompts[-1] == [USER, *ids("f"), END, ASSISTANT]


# A system message that fills the context is refused at once, not at every question; the old one stays.
def test_a_system_message_that_leaves_no_room() -> None:
    one, _ = talk(context=20)
    one.begin("Be brief.")
    with pytest.raises(
        ValueError, match=r"^the system message takes 25 of 20 tokens of context; shorten it$"
    ):
        run_command(one, "/system " + "x" * 20)
    assert one.system == "Be brief."


# A message such as a path begins with a slash; it was read as an unknown command.
def test_a_message_that_begins_with_a_slash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, engine = talk(says("a"), says("b"))
    inputs(monkeypatch, "//etc", "/etc", "///", "/exit")
    converse(one)
    questions = [prompt[prompt.index(USER) + 1 :][:-2] for prompt in engine.prompts]
    assert questions[0] == ids("/etc") and engine.prompts[1][-4:-2] == ids("//")
    assert "/etc: no such command" in capsys.readouterr().err


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the pipeline has run, the current one."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path, context=48)
    return tmp_path


@pytest.fixture
def printed(trained: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in `trained`; returns what it printed on standard output."""

    def run(*argv: str) -> str:
        chat.run(["--max-tokens", "8", *argv])
        return capsys.readouterr().out

    return run


# A script needs only the answer, and the same one for the same seed.
def test_one_shot_prints_only_the_answer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in (1, 1, 2):
        chat.run(["--prompt", "Hello", "--seed", str(seed), "--max-tokens", "8"])
        answers.append(capsys.readouterr())
    assert answers[0] == answers[1]
    assert answers[0].out != answers[2].out
    assert all("context" not in one.err and "model" not in one.err for one in answers)


# --system must reach the model with --prompt, too.
def test_system_message_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(64, [says("ok")])
    monkeypatch.setattr(chat, "open_model", lambda model, tokenizer_path: ScriptedModel(engine))
    chat.run(["--prompt", "?", "--system", "Be brief.", "--temperature", "0"])
    assert engine.prompts == [[*SYSTEM, USER, *ids("?"), END, ASSISTANT]]
    assert capsys.readouterr().out == "ok\n"


# Without a terminal each line is a message. Prompts, the banner or the encoding of the locale would corrupt
# the piped output.
def test_piped_lines(monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]) -> None:
    piped(monkeypatch, b"Hello\n\xc3\xa9\xff\n")
    both = printed("--seed", "4")
    assert both.startswith(printed("--seed", "4", "--prompt", "Hello"))
    assert "> " not in both
    assert "/help" not in both


# Each answer needs its own random numbers; setting the seed again must repeat the answers.
def test_seed_counts_up_by_answer(monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    model = open_model("sft", Path("data/train_bpe/tokenizer.json"))
    one = Chat(model.engine(), model.tokenizer, Sampling(seed=1), 8)

    def answers() -> list[str]:
        contents = []
        for _ in range(2):
            one.messages = []  # the same question again, as if it were the first
            one.answer(one.truncate_history("a")[0], lambda text: None)
            contents.append(one.messages[-1]["content"])
        return contents

    first = answers()
    assert first[0] != first[1]
    one.reset()
    assert answers() == first
    assert answers() != first
    run_command(one, "/seed 1")
    assert answers() == first


# With --prompt, Ctrl-C ends the program: a script must see that it was interrupted.
def test_ctrl_c_ends_the_one_shot_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ScriptedEngine(64, [[*ids("ab"), CTRL_C]])
    monkeypatch.setattr(chat, "open_model", lambda model, tokenizer_path: ScriptedModel(engine))
    monkeypatch.setattr(sys, "argv", ["chat", "--prompt", "?", "--temperature", "0"])
    with pytest.raises(SystemExit) as end:
        chat.main()
    assert end.value.code == 130
    assert capsys.readouterr().out == "ab\n"
