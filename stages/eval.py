"""The stage eval: metrics and samples of every trained model.

Held-out text is scored once, in windows of the context that don't overlap: loss, perplexity and bits per
UTF-8 byte over all tokens. Answer loss is computed with the true and with a shuffled question. The gap shows
whether the model uses the question. `python -m stages.eval [overrides]`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kernels.engine import Engine
from kernels.generation import Sampling, generate_batch
from kernels.ranks import ALONE, Link
from stages.batches import EvalWindows
from stages.chat_template import Messages, read_conversations, render_prompt, special_id
from stages.eval_report import CHAT_MODELS, Sample, Scores, figure_table, report_text, rounded
from stages.metrics import write_csv
from stages.packing import EvalConversations
from stages.program import ranked_stage_main
from stages.ranks.gpus import available_ranks
from stages.scoring import (
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
from stages.trained_model import TrainedModel, open_model
from stages.trained_stages import TRAINED_STAGES

# The models that are measured: name and folder of the checkpoint.
CHECKPOINTS = {stage.model: stage.checkpoint for stage in TRAINED_STAGES}
REPLIES = 100  # held-out questions that are answered, to count the answers that end by themselves
Item = TypeVar("Item")


class Evaluation:
    """The held-out data and the settings with which every model is measured.

    Args:
        settings: uses eval, numerics, runtime and pretrain.document_mask.
        tokenizer: the tokenizer of all models.
        shards: data/shard.
        conversations: the held-out conversations.
        context: of the models, in tokens.
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
        self._prompts = evenly_spaced(self._short_prompts(conversations), REPLIES)
        self.counts = {
            "text_tokens": self._held_out.tokens - 1,
            "text_bytes": self._held_out.counts.bytes,
            "conversations": self._answers.count,
        }
        self.missing = dict(self._answers.missing)
        if not self._prompts:
            self.missing["replies_ended"] = (
                f"no held-out question leaves half of model.context = {context} to the answer"
            )

    def engine(self, model: TrainedModel, link: Link) -> Engine:
        """An engine with the weights of the model; link: to the other ranks."""
        settings, runtime = self._settings, self._settings.runtime
        return model.engine(
            numerics=settings.numerics,
            micro_batch=settings.eval.micro_batch,
            device=runtime.device,
            threads=runtime.threads,
            link=link,
        )

    def measure(self, engine: Engine, *, chat: bool) -> Scores:
        """All scores and samples of one model."""
        shape = {"micro_batch": self._settings.eval.micro_batch, "context": self._context}
        windows = EvalWindows(self._held_out, **shape, separator_id=special_id(self._tokenizer, SEPARATOR),
                              document_mask=self._settings.pretrain.document_mask)  # fmt: skip
        text = score_text(engine, windows, self._unigram, engine.config.mtp_heads)
        pad = special_id(self._tokenizer, PAD)
        true, shuffled = (
            None
            if each is None
            else score_answers(engine, EvalConversations(each, **shape, pad_id=pad), self._end)
            for each in (self._answers.true, self._answers.shuffled)
        )
        if engine.ranks.rank:  # rank 0 writes the texts
            return Scores(text, true, shuffled, [], [])
        asked = self._prompts if chat else []
        replies = write_replies(
            engine, asked, self._sampling, max_tokens=self._settings.eval.max_tokens, end_id=self._end
        )
        return Scores(text, true, shuffled, self._samples(engine, chat=chat), replies)

    def _samples(self, engine: Engine, *, chat: bool) -> list[Sample]:
        e, tokenizer, separator = self._settings.eval, self._tokenizer, special_id(self._tokenizer, SEPARATOR)
        if chat:
            asked = e.chat_prompts
            prompts = [
                render_prompt([{"role": "user", "content": text}], tokenizer).tolist() for text in asked
            ]
        else:
            asked = e.prompts
            prompts = [[separator, *tokenizer.encode(text).tolist()] for text in asked]
        written = generate_batch(
            engine, prompts, self._sampling, max_tokens=e.max_tokens, stop=[self._end, separator]
        )
        return [Sample(text, tokenizer.decode(ids)) for text, ids in zip(asked, written, strict=True)]

    def _short_prompts(self, conversations: Iterable[Messages]) -> list[list[int]]:
        """The first questions of at most 4 * REPLIES conversations, evenly spaced, that leave half of the
        context to the answer.
        """
        questions = [question for question in map(question_of, conversations) if question]
        prompts = [
            render_prompt(question, self._tokenizer).tolist()
            for question in evenly_spaced(questions, 4 * REPLIES)
        ]
        return [prompt for prompt in prompts if len(prompt) <= self._context // 2]


def evenly_spaced(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly spaced from the first to the last."""
    return [items[place] for place in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)]


def run(
    settings: Settings,
    link: Link = ALONE,
    *,
    tokenizer_path: Path = Path("data/train_bpe/tokenizer.json"),
    shards: Path = Path("data/shard"),
    conversations: Path = Path("data/download/conversations.val.jsonl.zst"),
    checkpoints: Mapping[str, Path] = CHECKPOINTS,
    folder: Path = Path("data/eval"),
) -> None:
    """Measures every model.

    Args:
        settings: uses eval, numerics, runtime and pretrain.document_mask.
        link: to the other ranks, which run the same.
        tokenizer_path, shards, conversations: inputs.
        checkpoints: name of each model and the folder of its checkpoint.
        folder: output; gets metrics.json, heads.csv and report.md.

    Raises:
        ValueError: an input is missing or damaged, a checkpoint belongs to another tokenizer, or a metric is
            not finite.
    """
    models = {name: open_model(checkpoint, tokenizer_path) for name, checkpoint in checkpoints.items()}
    first = next(iter(models.values()))
    held_out = list(read_conversations(conversations))
    evaluation = Evaluation(settings, first.tokenizer, shards, held_out, first.checkpoint.config.context)
    scores: dict[str, Scores] = {}
    for name, model in models.items():
        engine = evaluation.engine(model, link)
        if link.rank == 0:
            print(f"eval: {name} model, {engine.describe()}", flush=True)
        scores[name] = evaluation.measure(engine, chat=name in CHAT_MODELS)
    if link.rank:
        return
    figures = {name: rounded(score.figures(), name) for name, score in scores.items()}
    facts: dict[str, Any] = {"device": engine.device, **evaluation.counts}
    if evaluation.missing:
        facts["missing"] = evaluation.missing
    write_text(folder / "metrics.json", json.dumps(facts | figures, indent=2) + "\n")
    rows = [(name, k, head.accuracy, head.loss, head.unigram_loss) for name, score in scores.items()
            for k, head in enumerate(score.text.heads)]  # fmt: skip
    write_csv(folder / "heads.csv", ("model", "head", "accuracy", "loss", "unigram_loss"), rows)
    table = figure_table(figures)
    report = report_text(table, scores, evaluation.counts, evaluation.missing, engine.describe())
    write_text(folder / "report.md", report)
    print(table + f"\neval: more in {folder / 'report.md'}", flush=True)


def main() -> None:
    """Runs the stage with params.yaml and the overrides of the command line."""
    ranked_stage_main("eval", run, lambda settings: available_ranks(settings.runtime))


if __name__ == "__main__":
    main()
