"""The results of eval as files: metrics.json's figures, a Markdown table and the report with samples."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stages.scoring import AnswerScore, Reply, TextScore
from stages.trained_stages import TRAINED_STAGES

CHAT_MODELS = {stage.model for stage in TRAINED_STAGES if stage.kind == "chat"}


@dataclass(frozen=True)
class Sample:
    """A prompt and the text that a model wrote after it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Scores:
    """Metrics and samples of one model. Only chat models have replies. None: the score cannot be computed."""

    text: TextScore
    answers: AnswerScore | None
    shuffled: AnswerScore | None
    samples: list[Sample]
    replies: list[Reply]

    def figures(self) -> dict[str, Any]:
        """The metrics as metrics.json holds them."""
        found: dict[str, Any] = {
            "loss": self.text.loss,
            "perplexity": math.exp(min(self.text.loss, 700.0)),  # exp overflows above 700
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


def rounded(figures: dict[str, Any], where: str) -> dict[str, Any]:
    """Every metric with 6 significant digits; ValueError if one is not finite, since JSON has no such
    number.
    """
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found[name] = rounded(value, f"{where}.{name}")
        elif not math.isfinite(value):
            raise ValueError(
                f"eval: {where}.{name} is {value}: the weights or logits of this model are not finite; train "
                "it again"
            )
        else:
            found[name] = value if isinstance(value, int) else float(f"{value:.6g}")
    return found


def figure_table(figures: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table: one row per metric, one column per model."""
    names = dict.fromkeys(
        name for each in figures.values() for name, value in each.items() if not isinstance(value, dict)
    )
    lines = ["| | " + " | ".join(figures) + " |", "|---|" + "---:|" * len(figures)]
    for name in names:
        cells = ("" if (value := each.get(name)) is None else f"{value:.6g}" for each in figures.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report_text(
    table: str,
    scores: Mapping[str, Scores],
    counts: Mapping[str, int],
    missing: Mapping[str, str],
    device: str,
) -> str:
    """The Markdown report: metrics, prediction heads, samples and the device.

    Args:
        table: of figure_table.
        scores: of each model, by its name.
        counts: text_tokens, text_bytes and conversations that were scored.
        missing: the reason for each metric that cannot be computed.
        device: as Engine.describe gives it.
    """
    reasons = [f"- {figure}: {reason}" for figure, reason in missing.items()]
    parts = [
        "# Evaluation\n",
        table,
        f"Text: {counts['text_tokens']:,} tokens of {counts['text_bytes']:,} UTF-8 bytes, each "
        "once, in windows of the",
        "context that don't overlap, under head 0; losses are nats a token.\n",
        f"Answers: {counts['conversations']:,} held-out conversations. answer_loss counts the answers' "
        "contents,",
        "end_of_turn_loss the token that closes each, sft_loss both; for answer_loss_shuffled "
        "each answer stands behind",
        "another conversation's question.\n",
        *replies_lines(scores),
        *(["Figures that cannot be had:\n", *reasons, ""] if reasons else []),
        "## Prediction heads\n",
        "Head k predicts the token k + 1 ahead; unigram is the loss of the training text's token "
        "frequencies.\n",
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


def replies_lines(scores: Mapping[str, Scores]) -> list[str]:
    """How many answers of each chat model end by themselves, one line per model."""
    chats = {name: score.replies for name, score in scores.items() if name in CHAT_MODELS}
    lines = []
    for name, replies in chats.items():
        model = f" of the {name} model" if len(chats) > 1 else ""
        ended = sum(reply.ended for reply in replies)
        lines.append(
            f"Replies{model}: {ended} of {len(replies)} answers to held-out questions end by themselves.\n"
        )
    return lines


def indented(text: str) -> str:
    """A text as an indented Markdown code block; control characters are replaced."""
    shown = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return "\n".join("    " + line for line in shown.split("\n"))
