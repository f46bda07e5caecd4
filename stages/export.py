"""The command export: a trained model as a folder that Hugging Face's transformers loads.

    python -m stages.export format=hf
    python -m stages.export format=hf model=pretrain output=export/base

model       the stage that trained it, or the folder of a checkpoint; default sft
tokenizer   its tokenizer.json; default data/train_bpe/tokenizer.json
output      the folder to write; default export/hf
kind        base or chat. The stages' own models have theirs; a checkpoint elsewhere is a chat model unless
kind=base is given

In training, every document of a base model begins with <|endoftext|>. So the tokenizer of its export puts
that token before a text. The tokenizer of a chat model does not: conversations begin with the tokens of the
chat template.

A model of the euler parts becomes a LlamaForCausalLM, with weighted QK-norm a Qwen3ForCausalLM, and one of
GPT-2's parts a GPT2LMHeadModel. Other combinations have no class in transformers and are refused. No class
has MTP heads; they go to mtp_heads.safetensors. Padding rows of the vocabulary are removed. If a text
contains a special token as typed text, transformers reads it as the special token, while our encoder reads
it as text: remove special tokens from what users type.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.checkpoint import Checkpoint, write_arrays
from stages.hf_format import (
    architecture,
    gpt2_weights,
    hf_config,
    llama_weights,
    token_ids,
    tokenizer_config,
    tokenizer_json,
)
from stages.program import command_main
from stages.text_files import write_text
from stages.tokenizer import Tokenizer
from stages.trained_model import open_model
from stages.trained_stages import CHAT_MODEL, TRAINED_STAGES

DEFAULTS = {
    "format": "",
    "model": CHAT_MODEL,
    "tokenizer": "data/train_bpe/tokenizer.json",
    "output": "export/hf",
    "kind": "",
}
KINDS: dict[str, str] = {stage.name: stage.kind for stage in TRAINED_STAGES}
MTP_HEADS_FILE = "mtp_heads.safetensors"
FORMAT = {"format": "pt"}  # metadata that transformers expects in a safetensors file


def kind_of(model: str, kind: str) -> str:
    """base or chat: as given, else that of the stage which trained the model; chat for a folder elsewhere.

    Raises:
        ValueError: the given kind is neither.
    """
    if kind and kind not in KINDS.values():
        raise ValueError(f"kind: expected base or chat, got {kind}")
    return kind or KINDS.get(model) or KINDS.get(Path(model).resolve().parent.name) or "chat"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def export(checkpoint: Checkpoint, tokenizer: Tokenizer, output: Path, *, kind: str) -> str:
    """Writes the folder of a model of this kind, base or chat; returns the name of its class.

    Raises:
        ValueError: no class of transformers matches the model, or the folder cannot be written.
    """
    c, weights = checkpoint.config, checkpoint.weights
    name = architecture(c)
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise ValueError(
            f"output: {output} contains files but no earlier export; set output to an empty or new folder"
        )
    theirs = (gpt2_weights if name == "GPT2LMHeadModel" else llama_weights)(weights, c)
    write_arrays(output / "model.safetensors", theirs, FORMAT)
    if c.mtp_heads > 1:
        # Entry k predicts the token k + 2 ahead: head 0 is not included.
        further = weights["head.weight"][0 if c.tied_head else 1 :, : c.vocab_size]
        write_arrays(output / MTP_HEADS_FILE, {"heads.weight": further}, FORMAT)
    else:
        (output / MTP_HEADS_FILE).unlink(missing_ok=True)  # of an earlier export to this folder
    ids = token_ids(tokenizer.special)
    write_json(output / "config.json", hf_config(c, name) | ids)
    write_json(output / "generation_config.json", ids)
    write_json(output / "tokenizer_config.json", tokenizer_config(tokenizer, c.context))
    write_json(output / "tokenizer.json", tokenizer_json(tokenizer, begins_text=kind == "base"))
    return name


def run(argv: list[str]) -> None:
    """Exports the model that the command line names.

    Raises:
        ValueError: an argument is unknown, the model is missing or damaged, or no class of transformers
            matches it.
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    chosen = dict(DEFAULTS)
    for argument in argv:
        key, _, value = argument.partition("=")
        if key not in DEFAULTS or not value:
            raise ValueError(f"{argument}: expected {', '.join(f'{name}=...' for name in DEFAULTS)}")
        chosen[key] = value
    if chosen["format"] != "hf":
        raise ValueError(f"format: expected hf, got {chosen['format'] or 'none'}; set format=hf")
    kind = kind_of(chosen["model"], chosen["kind"])
    model, output = open_model(chosen["model"], Path(chosen["tokenizer"])), Path(chosen["output"])
    name = export(model.checkpoint, model.tokenizer, output, kind=kind)
    vocab_size = model.checkpoint.config.vocab_size
    print(f"{output}: {name}, {vocab_size} tokens, exported as a {kind} model", file=sys.stderr)


def main() -> None:
    """Runs the command; an error that the user can fix is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
