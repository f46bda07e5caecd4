"""The stage eval: what base and chat model are worth, in figures and samples.

Text is scored whole, once, in windows of the context that don't overlap, all tokens counting: loss, perplexity and bits per
UTF-8 byte. Answers are scored behind their own questions and behind others', so that it shows whether a model listens.
`python -m stages.eval [overrides]`.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kernels.engine import Engine
from kernels.generation import Sampling, generate_batch
from stages.batches import EvalWindows
from stages.chat_template import Messages, read_conversations, render_prompt, special_id
from stages.checkpoint import Checkpoint, load
from stages.metrics import write_csv
from stages.program import stage_main
from stages.scoring import (
    AnswerScore,
    Reply,
    TextScore,
    eval_batches,
    held_out_answers,
    question_of,
    score_answers,
    score_text,
    unigram_nats,
    write_replies,
)
from stages.settings import Settings
from stages.shard_format import open_split
from stages.special_tokens import END, PAD, SEPARATOR
from stages.text_files import write_text
from stages.tokenizer import Tokenizer

REPLIES = 100  # held-out questions that are answered, to count the answers that end
Item = TypeVar("Item")


@dataclass(frozen=True)
class Sample:
    """A prompt and what a model wrote after it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Scores:
    """One model's figures and samples; `replies` are the chat model's alone, None is a score that cannot be had."""

    text: TextScore
    answers: AnswerScore | None
    shuffled: AnswerScore | None
    samples: list[Sample]
    replies: list[Reply]

    def figures(self) -> dict[str, Any]:
        """The figures as metrics.json holds them."""
        found: dict[str, Any] = {
            "loss": self.text.loss,
            "perplexity": math.exp(min(self.text.loss, 700.0)),  # 700: where a float ends
            "bits_per_byte": self.text.bits_per_byte,
        }
        if self.answers:
            found["answer_loss"] = self.answers.content_loss
        if self.shuffled:
            found["answer_loss_shuffled"] = self.shuffled.content_loss
        if self.answers:
            found |= {"end_of_turn_loss": self.answers.end_loss, "sft_loss": self.answers.loss}
        if self.replies:
            found["replies"] = len(self.replies)
            found["replies_ended"] = sum(reply.ended for reply in self.replies) / len(self.replies)
        return {**found, "heads": {str(k): asdict(head) for k, head in enumerate(self.text.heads)}}


class Evaluation:
    """The data and the rules by which any model is measured.

    Args:
        settings: eval, numerics, runtime, and whether pretraining kept documents apart.
        tokenizer: the tokenizer.
        shards: data/shard.
        conversations: the held-out ones.
        context: of the models.
    """

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        shards: Path,
        conversations: Sequence[Messages],
        context: int,
    ) -> None:
        self._settings, self._tokenizer, self._context = settings, tokenizer, context
        self._held_out = open_split(shards, "val", tokenizer.sha256, tokenizer.vocab_size)
        self._unigram = unigram_nats(open_split(shards, "train", tokenizer.sha256, tokenizer.vocab_size))
        self._end = special_id(tokenizer, END)
        e = settings.eval
        self._sampling = Sampling(temperature=e.temperature, top_k=e.top_k, top_p=e.top_p, seed=e.seed)
        self._answers = held_out_answers(conversations, tokenizer, context=context, seed=settings.eval.seed)
        self._prompts = spread(self._short_prompts(conversations), REPLIES)
        self.counts = {
            "text_tokens": self._held_out.tokens - 1,
            "text_bytes": self._held_out.counts.bytes,
            "conversations": self._answers.count,
        }
        self.missing = dict(self._answers.missing)
        if not self._prompts:
            self.missing["replies_ended"] = (
                f"no held-out question leaves half of model.context = {context} to its answer"
            )

    def engine(self, model: Checkpoint) -> Engine:
        """An engine that holds the model."""
        runtime = self._settings.runtime
        engine = Engine(model.config, self._settings.numerics, micro_batch=self._settings.eval.micro_batch,
                        device=runtime.device, threads=runtime.threads, seed=None, training=False)  # fmt: skip
        engine.load(model.weights)
        return engine

    def measure(self, engine: Engine, heads: int, *, chat: bool) -> Scores:
        """All scores and samples of one model."""
        rows = {"micro_batch": self._settings.eval.micro_batch, "context": self._context}
        windows = EvalWindows(self._held_out, **rows, separator_id=special_id(self._tokenizer, SEPARATOR),
                              document_mask=self._settings.pretrain.document_mask)  # fmt: skip
        text = score_text(engine, windows, self._unigram, heads)
        pad = special_id(self._tokenizer, PAD)
        true, shuffled = (
            None if each is None else score_answers(engine, eval_batches(each, **rows, pad_id=pad), self._end)
            for each in (self._answers.true, self._answers.shuffled)
        )
        asked = self._prompts if chat else []
        replies = write_replies(
            engine, asked, self._sampling, max_tokens=self._settings.eval.max_tokens, end_id=self._end
        )
        return Scores(text, true, shuffled, self._samples(engine, chat=chat), replies)

    def _samples(self, engine: Engine, *, chat: bool) -> list[Sample]:
        e, tokenizer, separator = self._settings.eval, self._tokenizer, special_id(self._tokenizer, SEPARATOR)
        if chat:
            asked = e.chat_prompts
            prompts = [render_prompt([{"role": "user", "content": text}], tokenizer).tolist() for text in asked]
        else:
            asked = e.prompts
            prompts = [[separator, *tokenizer.encode(text).tolist()] for text in asked]
        written = generate_batch(
            engine, prompts, self._sampling, max_tokens=e.max_tokens, stop=[self._end, separator]
        )
        return [Sample(text, tokenizer.decode(ids)) for text, ids in zip(asked, written, strict=True)]

    def _short_prompts(self, conversations: Iterable[Messages]) -> list[list[int]]:
        """The first question of each conversation, where it leaves half of the context to the answer."""
        questions = [question for question in map(question_of, conversations) if question]
        prompts = [
            render_prompt(question, self._tokenizer).tolist() for question in spread(questions, 4 * REPLIES)
        ]
        return [prompt for prompt in prompts if len(prompt) <= self._context // 2]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly from the first to the last."""
    return [items[place] for place in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)]


def run(
    settings: Settings,
    *,
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
    shards: Path = Path("data/shard"),
    conversations: Path = Path("data/download/conversations.val.jsonl.zst"),
    base: Path = Path("data/pretrain/checkpoint"),
    chat: Path = Path("data/sft/checkpoint"),
    folder: Path = Path("data/eval"),
) -> None:
    """Measures base and chat model.

    Args:
        settings: eval, numerics and runtime are used, and pretrain.document_mask.
        tokenizer_path, shards, conversations, base, chat: what it reads.
        folder: where it writes metrics.json, heads.csv and report.md.

    Raises:
        ValueError: what it reads does not belong together, or a figure is not finite.
    """
    tokenizer = Tokenizer.load(tokenizer_path)
    models = {"base": load(base, tokenizer.sha256), "chat": load(chat, tokenizer.sha256)}
    context = models["base"].config.context
    evaluation = Evaluation(settings, tokenizer, shards, list(read_conversations(conversations)), context)
    scores: dict[str, Scores] = {}
    for name, model in models.items():
        engine = evaluation.engine(model)
        print(f"eval: {name} model, {engine.describe()}", flush=True)
        scores[name] = evaluation.measure(engine, model.config.mtp_heads, chat=name == "chat")
    figures = {name: rounded(score.figures(), name) for name, score in scores.items()}
    facts: dict[str, Any] = {"device": engine.device, **evaluation.counts}
    if evaluation.missing:
        facts["missing"] = evaluation.missing
    write_text(folder / "metrics.json", json.dumps(facts | figures, indent=2) + "\n")
    rows = [(name, k, head.accuracy, head.loss, head.unigram_loss) for name, score in scores.items()
            for k, head in enumerate(score.text.heads)]  # fmt: skip
    write_csv(folder / "heads.csv", ("model", "head", "accuracy", "loss", "unigram_loss"), rows)
    table = figure_table(figures)
    write_text(folder / "report.md", write_report(table, scores, evaluation, engine.describe()))
    print(table + f"\neval: more in {folder / 'report.md'}", flush=True)


def rounded(figures: dict[str, Any], where: str) -> dict[str, Any]:
    """Every figure with 6 significant digits; ValueError where one is not finite, which JSON cannot hold."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found[name] = rounded(value, f"{where}.{name}")
        elif not math.isfinite(value):
            raise ValueError(
                f"eval: {where}.{name} is {value}: the model's weights or logits are not finite; train it anew"
            )
        else:
            found[name] = value if isinstance(value, int) else float(f"{value:.6g}")
    return found


def figure_table(figures: dict[str, dict[str, Any]]) -> str:
    """A Markdown table: a row a figure, a column a model."""
    names = dict.fromkeys(
        name for each in figures.values() for name, value in each.items() if not isinstance(value, dict)
    )
    lines = ["| | " + " | ".join(figures) + " |", "|---|" + "---:|" * len(figures)]
    for name in names:
        cells = ("" if (value := each.get(name)) is None else f"{value:.6g}" for each in figures.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_report(table: str, scores: dict[str, Scores], evaluation: Evaluation, device: str) -> str:
    """The Markdown report: figures, prediction heads, samples, and on what they were made."""
    replies, counts = scores["chat"].replies, evaluation.counts
    ended = sum(reply.ended for reply in replies)
    missing = [f"- {figure}: {reason}" for figure, reason in evaluation.missing.items()]
    parts = [
        "# Evaluation\n",
        table,
        f"Text: {counts['text_tokens']:,} tokens of {counts['text_bytes']:,} UTF-8 bytes, each once, in windows of the",
        "context that don't overlap, under head 0; losses are nats a token.\n",
        f"Answers: {counts['conversations']:,} held-out conversations. answer_loss counts the answers' contents,",
        "end_of_turn_loss the token that closes each, sft_loss both; for answer_loss_shuffled each answer stands behind",
        "another conversation's question.\n",
        f"Replies: {ended} of {len(replies)} answers to held-out questions end by themselves.\n",
        *(["Figures that cannot be had:\n", *missing, ""] if missing else []),
        "## Prediction heads\n",
        "Head k predicts the token k + 1 ahead; unigram is the loss of the training text's token frequencies.\n",
        "| model | head | accuracy | loss | unigram |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, score in scores.items():
        for k, h in enumerate(score.text.heads):
            parts.append(f"| {name} | {k} | {h.accuracy:.4f} | {h.loss:.4f} | {h.unigram_loss:.4f} |")
    for name, score in scores.items():
        parts.append(f"\n## Samples of the {name} model\n")
        parts += [
            f"{indented(sample.prompt)}\n\n...\n\n{indented(sample.text)}\n" for sample in score.samples
        ]
    return "\n".join(parts) + f"\nMade on: {device}\n"


def indented(text: str) -> str:
    """A text as a Markdown block, whatever stands in it."""
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return "\n".join("    " + line for line in shown.split("\n"))


def main() -> None:
    """Runs the stage on params.yaml and the command line's overrides."""
    stage_main("eval", run)


if __name__ == "__main__":
    main()
