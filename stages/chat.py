"""The command chat: a conversation with the chat model.

    python -m stages.chat                      asks for messages; from a pipe, takes each line as one
    python -m stages.chat --prompt "Hello"     prints the answer, and nothing else
    python -m stages.chat --system "Be brief." with a system message in front of the conversation

Ctrl-C stops the answer, Ctrl-D leaves, /help lists what can be set. A message that begins with a slash is written with two.
Answers go to standard output, all else to standard error.

System message, conversation and answer have to fit the model's context. When the conversation no longer fits, the oldest
question-answer pairs are dropped, and a notice says so; the system message stays. An answer ends where the context does.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from typing import Any, Literal

from kernels.engine import Engine
from kernels.generation import Sampling, Speculation, generate
from stages.chat_template import render_prompt, special_id
from stages.generate import (
    at_least_one,
    banner,
    command_parser,
    open_model,
    sampling_of,
    show,
    speculation_of,
)
from stages.program import command_main
from stages.special_tokens import END
from stages.tokenizer import Tokenizer, Utf8Stream

HELP = """\
/temperature X   0 takes the likeliest token, higher is bolder
/top_k K         draws among the K likeliest tokens, 0 is off
/top_p P         draws among the likeliest tokens with a share P of the probability, 1 is off
/seed N          the same messages after the same seed get the same answers
/max_tokens N    most tokens of an answer
/system TEXT     begins a new conversation behind this system message; without a text, behind none
/show            the settings, and how full the context is
/reset           begins a new conversation; the system message stays
/exit            leaves, as does Ctrl-D; Ctrl-C stops an answer
//TEXT           sends the message /TEXT"""

INT_SETTINGS = ("top_k", "seed", "max_tokens")  # the settings that are integers
SETTINGS = ("temperature", "top_p", *INT_SETTINGS)

# What ended an answer: the model itself, Ctrl-C, max_tokens, or the context.
Ending = Literal["model", "interrupt", "max_tokens", "context"]


class Chat:
    """One conversation and how it is answered.

    Args:
        engine, tokenizer: the model and its tokenizer.
        sampling: how tokens are drawn; the seed counts up by one an answer.
        max_tokens: of an answer.
        speculation: whether the prediction heads draft.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_tokens: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._speculation = engine, tokenizer, speculation
        self.sampling, self.max_tokens = sampling, max_tokens
        self.messages: list[dict[str, str]] = []  # without the system message
        self.system = ""
        self._answers = 0
        self._end = special_id(tokenizer, END)
        # Typed text never holds a special token; what the model writes must not either.
        self._banned = set(tokenizer.special.values()) - {self._end}

    def reset(self) -> None:
        """Begin a new conversation; with the same seed the same messages get the same answers again."""
        self.messages, self._answers = [], 0

    def begin(self, system: str) -> None:
        """Begin a new conversation behind a system message, or behind none where it is empty.

        Raises:
            ValueError: it leaves no room for a question and an answer.
        """
        before, self.system = self.system, system
        context, shortest = self._engine.config.context, [{"role": "user", "content": ""}]
        if (length := self._length(shortest)) >= context:
            self.system = before
            raise ValueError(
                f"the system message takes {length} tokens of the {context} that the model reads; shorten it"
            )
        self.reset()

    def truncate_history(self, text: str) -> tuple[list[dict[str, str]], int]:
        """The conversation with a new question, without its oldest turns where the context is too small.

        They are left out until the context has room for an answer of max_tokens or half a context; the question itself stays,
        also where it leaves less.

        Returns:
            the messages to answer, and how many turns were left out.

        Raises:
            ValueError: the question leaves no room at all.
        """
        context = self._engine.config.context
        messages = [*self.messages, {"role": "user", "content": text}]
        room = min(self.max_tokens, context // 2)
        dropped = 0
        while len(messages) > 1 and self._length(messages) > context - room:
            messages, dropped = messages[2:], dropped + 1
        if (length := self._length(messages)) >= context:
            raise ValueError(
                f"this message takes {length} tokens of the {context} that the model reads; shorten it"
            )
        return messages, dropped

    def answer(self, messages: list[dict[str, str]], write: Callable[[str], None]) -> Ending:
        """Answer what truncate_history returned; add the answer to the conversation."""
        prompt, stream = render_prompt(self._read(messages), self._tokenizer).tolist(), Utf8Stream(self._tokenizer)
        limit = min(self.max_tokens, self._engine.config.context - len(prompt))
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)
        settings: dict[str, Any] = {
            "stop": [self._end],
            "banned": self._banned,
            "speculation": self._speculation,
        }
        ids: list[int] = []
        try:
            for token in generate(self._engine, prompt, sampling, max_tokens=limit, **settings):
                ids.append(token)
                write(stream.feed([token]))
            write(stream.flush())
        except KeyboardInterrupt:
            return "interrupt"
        finally:
            # Bytes that make no character are shown as U+FFFD, but the model shall not read that.
            content = self._tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self._answers += 1
        if len(ids) < limit:
            return "model"
        return "max_tokens" if limit == self.max_tokens else "context"

    def set(self, name: str, value: str) -> None:
        """Change a setting; ValueError where the value is not one of its."""
        try:
            number = int(value) if name in INT_SETTINGS else float(value)
        except ValueError:
            raise ValueError(
                f"{name}: expected a {'whole ' * (name in INT_SETTINGS)}number, got {value!r}"
            ) from None
        if name == "max_tokens":
            self.max_tokens = at_least_one(name, int(number))
            return
        changed: dict[str, Any] = {name: number}
        self.sampling = replace(self.sampling, **changed)
        if name == "seed":
            self._answers = 0

    def describe(self) -> str:
        """The settings, and how full the context is, in a line."""
        s, turns = self.sampling, len(self.messages) // 2
        used = self._length(self.messages) if self.messages or self.system else 0
        return (
            f"temperature {s.temperature:g}, top_k {s.top_k}, top_p {s.top_p:g}, seed {s.seed}, max_tokens {self.max_tokens}; "
            f"{turns} turn{'s' * (turns != 1)}, {used} of {self._engine.config.context} tokens"
            + (f"; system message {self.system!r}" if self.system else "")
            + (f"; {self._speculation.describe()}" if self._speculation else "")
        )

    def _read(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """What the model reads of a conversation."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def _length(self, messages: list[dict[str, str]]) -> int:
        return len(render_prompt(self._read(messages), self._tokenizer))


def run_command(chat: Chat, command: str) -> str:
    """Carries out a /command other than /exit; returns what to tell the user. ValueError where it is not one."""
    name, _, value = command.removeprefix("/").partition(" ")
    if name in SETTINGS:
        chat.set(name, value.strip())
    elif name == "system":
        chat.begin(value.strip())
        return "a new conversation, " + (
            "behind this system message" if chat.system else "without a system message"
        )
    elif name == "reset":
        chat.reset()
        return "a new conversation"
    elif name == "help":
        return HELP
    elif name != "show":
        raise ValueError(f"/{name}: no such command; /help lists them")
    return chat.describe()


def print_status(text: str) -> None:
    """A line for the user that is no part of an answer."""
    print(text, file=sys.stderr, flush=True)


def reply(chat: Chat, text: str) -> Ending:
    """One question and its answer, with the lines that say what was left out or cut."""
    messages, dropped = chat.truncate_history(text)
    if dropped:
        print_status(f"(the context is full: the oldest {dropped} turn{'s' * (dropped > 1)} left out)")
    ending = chat.answer(messages, show)
    show("\n")
    if ending != "model":
        reasons = {
            "interrupt": "stopped",
            "max_tokens": f"cut at max_tokens = {chat.max_tokens}",
            "context": "cut: the context is full",
        }
        print_status(f"({reasons[ending]})")
    return ending


def converse(chat: Chat) -> None:
    """Reads messages and commands until the input ends or /exit; Ctrl-C stops what is under way, never the program."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
            if line == "/exit":
                return
            if line.startswith("/") and not line.startswith("//"):
                print_status(run_command(chat, line))
            elif line:
                reply(chat, line.removeprefix("/") if line.startswith("//") else line)
        except EOFError:
            return
        except KeyboardInterrupt:
            print_status("\n(/exit or Ctrl-D leaves)")
        except ValueError as error:
            print_status(f"error: {error}")


def run(argv: list[str]) -> None:
    """One answer where the command line gives a prompt, else a conversation.

    Raises:
        ValueError: an argument is out of its range, the model can't be had, or the prompt doesn't fit it.
        KeyboardInterrupt: Ctrl-C while the only answer was written.
    """
    parser = command_parser("chat", __doc__ or "", model="sft")
    parser.add_argument("--prompt", help="the one message to answer")
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="a system message before the conversation; default none"
    )
    args = parser.parse_args(argv)
    sampling, max_tokens = sampling_of(args), at_least_one("max_tokens", args.max_tokens)
    engine, tokenizer = open_model(args.model, args.tokenizer, args.threads)
    chat = Chat(engine, tokenizer, sampling, max_tokens, speculation_of(args, engine))
    chat.begin(args.system)
    if args.prompt is not None:
        if reply(chat, args.prompt) == "interrupt":
            raise KeyboardInterrupt
        return
    if isinstance(sys.stdin, TextIOWrapper):
        # A byte that is not UTF-8 is one odd character, not the end; pipes on Windows have another default encoding.
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and line editing; Windows' console has its own
    print_status(f"{banner(args.model, engine, sampling)}\n/help lists the commands")
    converse(chat)


def main() -> None:
    """Runs the command; what its user can repair is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
