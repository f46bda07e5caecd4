"""The command chat: a conversation with the chat model.

    python -m stages.chat                      asks for messages; from a pipe, each line is a message
    python -m stages.chat --prompt "Hello"     prints the answer, and nothing else
    python -m stages.chat --system "Be brief." with a system message before the conversation

Ctrl-C stops the answer, Ctrl-D exits, /help lists the commands. Write // to begin a message with a slash.
Answers go to standard output, everything else to standard error.

System message, conversation and answer must fit the context of the model. When the conversation no longer
fits, the oldest question-answer pairs are dropped, and a notice says so; the system message stays. An answer
is cut when the context is full.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from typing import Any, Literal

from kernels.engine import Engine
from kernels.generation import Sampling, SpeculativeStats, generate
from stages.chat_template import render_prompt, special_id
from stages.generate import at_least_one, banner, command_parser, sampling_of, show, speculation_of
from stages.program import command_main
from stages.special_tokens import END
from stages.tokenizer import Tokenizer, Utf8Stream
from stages.trained_model import open_model
from stages.trained_stages import CHAT_MODEL

HELP = """\
/temperature X   0 is greedy decoding, higher values are more random
/top_k K         sample from the K most likely tokens, 0 is off
/top_p P         sample from the most likely tokens with total probability P, 1 is off
/seed N          the same messages after the same seed get the same answers
/max_tokens N    maximum tokens of an answer
/system TEXT     begins a new conversation with this system message; without TEXT, with none
/show            the settings, and how full the context is
/reset           begins a new conversation; the system message stays
/exit            exits, as Ctrl-D does; Ctrl-C stops an answer
//TEXT           sends the message /TEXT"""

INT_SETTINGS = ("top_k", "seed", "max_tokens")
SETTINGS = ("temperature", "top_p", *INT_SETTINGS)

# Why an answer ended: its end-of-turn token, Ctrl-C, max_tokens, or the context.
Ending = Literal["model", "interrupt", "max_tokens", "context"]


class Chat:
    """One conversation and its settings.

    Args:
        engine, tokenizer: the model and its tokenizer.
        sampling: how tokens are sampled; each answer takes the next seed.
        max_tokens: maximum tokens of an answer.
        speculation: counters of speculative decoding; None: plain decoding.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_tokens: int,
        speculation: SpeculativeStats | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._speculation = engine, tokenizer, speculation
        self.sampling, self.max_tokens = sampling, max_tokens
        self.messages: list[dict[str, str]] = []  # without the system message
        self.system = ""
        self._answers = 0
        self._end = special_id(tokenizer, END)
        # A typed message never contains a special token; an answer must not contain one either.
        self._suppressed = set(tokenizer.special.values()) - {self._end}

    def reset(self) -> None:
        """Begin a new conversation; with the same seed the same messages get the same answers."""
        self.messages, self._answers = [], 0

    def begin(self, system: str) -> None:
        """Begin a new conversation with a system message; with an empty one, without.

        Raises:
            ValueError: the system message leaves no room for a question and an answer.
        """
        before, self.system = self.system, system
        context, shortest = self._engine.config.context, [{"role": "user", "content": ""}]
        if (length := self._length(shortest)) >= context:
            self.system = before
            raise ValueError(f"the system message takes {length} of {context} tokens of context; shorten it")
        self.reset()

    def truncate_history(self, text: str) -> tuple[list[dict[str, str]], int]:
        """The conversation with a new question, without the oldest turns that no longer fit the context.

        Turns are dropped until the context has room for an answer of max_tokens or half a context. The
        question itself stays, even if it leaves less room.

        Returns:
            the messages to answer, and the number of dropped turns.

        Raises:
            ValueError: the question leaves no room for an answer.
        """
        context = self._engine.config.context
        messages = [*self.messages, {"role": "user", "content": text}]
        room = min(self.max_tokens, context // 2)
        dropped = 0
        while len(messages) > 1 and self._length(messages) > context - room:
            messages, dropped = messages[2:], dropped + 1
        if (length := self._length(messages)) >= context:
            raise ValueError(f"this message takes {length} of {context} tokens of context; shorten it")
        return messages, dropped

    def answer(self, messages: list[dict[str, str]], write: Callable[[str], None]) -> Ending:
        """Answer the messages of truncate_history; the conversation then consists of them and the answer.

        `write` gets the answer as it is generated, in whole characters.
        """
        tokenizer = self._tokenizer
        prompt, stream = render_prompt(self._with_system(messages), tokenizer).tolist(), Utf8Stream(tokenizer)
        limit = min(self.max_tokens, self._engine.config.context - len(prompt))
        sampling = replace(self.sampling, seed=self.sampling.seed + self._answers)
        settings: dict[str, Any] = {
            "stop": [self._end],
            "suppressed": self._suppressed,
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
            # The user sees U+FFFD for incomplete characters; the model must not read it.
            content = tokenizer.decode_bytes(ids).decode("utf-8", errors="ignore")
            self.messages = [*messages, {"role": "assistant", "content": content}]
            self._answers += 1
        if len(ids) < limit:
            return "model"
        return "max_tokens" if limit == self.max_tokens else "context"

    def set(self, name: str, value: str) -> None:
        """Change a setting; ValueError if the value is not valid for it."""
        is_int = name in INT_SETTINGS
        try:
            number = int(value) if is_int else float(value)
        except ValueError:
            raise ValueError(f"{name}: expected a {'whole ' * is_int}number, got {value!r}") from None
        if name == "max_tokens":
            self.max_tokens = at_least_one(name, int(number))
            return
        changed: dict[str, Any] = {name: number}
        self.sampling = replace(self.sampling, **changed)
        if name == "seed":
            self._answers = 0

    def describe(self) -> str:
        """The settings, and how full the context is, in one line."""
        s, turns = self.sampling, len(self.messages) // 2
        used = self._length(self.messages) if self.messages or self.system else 0
        return (
            f"temperature {s.temperature:g}, top_k {s.top_k}, top_p {s.top_p:g}, seed {s.seed}, max_tokens "
            f"{self.max_tokens}; "
            f"{turns} turn{'s' * (turns != 1)}, {used} of {self._engine.config.context} tokens"
            + (f"; system message {self.system!r}" if self.system else "")
            + (f"; {self._speculation.describe()}" if self._speculation else "")
        )

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages that the model reads: the system message, if any, and the conversation."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def _length(self, messages: list[dict[str, str]]) -> int:
        return len(render_prompt(self._with_system(messages), self._tokenizer))


def run_command(chat: Chat, command: str) -> str:
    """Runs a /command other than /exit; returns a status line. ValueError if there is no such command."""
    name, _, value = command.removeprefix("/").partition(" ")
    if name in SETTINGS:
        chat.set(name, value.strip())
    elif name == "system":
        chat.begin(value.strip())
        return f"new conversation, {'with this' if chat.system else 'without a'} system message"
    elif name == "reset":
        chat.reset()
        return "new conversation"
    elif name == "help":
        return HELP
    elif name != "show":
        raise ValueError(f"/{name}: no such command; /help lists the commands")
    return chat.describe()


def print_status(text: str) -> None:
    """Prints a line that is not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def reply(chat: Chat, text: str) -> Ending:
    """Answers one question; notices say which turns were dropped and why an answer was cut."""
    messages, dropped = chat.truncate_history(text)
    if dropped:
        print_status(f"(the context is full: the oldest {dropped} turn{'s' * (dropped > 1)} dropped)")
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
    """Reads messages and commands until the input ends or /exit; Ctrl-C stops an answer, but never the
    program.
    """
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
            print_status("\n(/exit or Ctrl-D exits)")
        except ValueError as error:
            print_status(f"error: {error}")


def run(argv: list[str]) -> None:
    """One answer if the command line has a prompt, else a conversation.

    Raises:
        ValueError: an argument is out of range, the model is missing or damaged, or the prompt does not fit
            its context.
        KeyboardInterrupt: Ctrl-C while the only answer was generated.
    """
    parser = command_parser("chat", __doc__ or "", model=CHAT_MODEL)
    parser.add_argument("--prompt", help="the one message to answer")
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="a system message before the conversation; default none"
    )
    args = parser.parse_args(argv)
    sampling, max_tokens = sampling_of(args), at_least_one("max_tokens", args.max_tokens)
    model = open_model(args.model, args.tokenizer)
    engine = model.engine(threads=args.threads)
    chat = Chat(engine, model.tokenizer, sampling, max_tokens, speculation_of(args, engine))
    chat.begin(args.system)
    if args.prompt is not None:
        if reply(chat, args.prompt) == "interrupt":
            raise KeyboardInterrupt
        return
    if isinstance(sys.stdin, TextIOWrapper):
        # A byte that is not UTF-8 becomes U+FFFD and does not end the input. Pipes on Windows have another
        # default encoding.
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() history and line editing; Windows has its own
    print_status(f"{banner(args.model, engine, sampling)}\n/help lists the commands")
    converse(chat)


def main() -> None:
    """Runs the command; an error that the user can fix is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
