"""The command export: a trained model as a folder that Hugging Face's transformers, and what reads its files, loads.

    python -m stages.export format=hf
    python -m stages.export format=hf model=pretrain output=export/base

model is sft (chat, the default), pretrain (base) or a checkpoint's folder; tokenizer its tokenizer.json, data/train_bpe's
where none is given; output the folder written to, export/hf where none is given. kind is base or chat: what the model is. The
folders of this pipeline tell it themselves; a checkpoint elsewhere is taken for a chat model unless kind=base is given.

Every document that a base model was trained on begins with <|endoftext|>, so the tokenizer of its export puts that token in
front of a text. A chat model's does not: its conversations begin with their template's own tokens.

A model of the euler parts becomes a LlamaForCausalLM, one of GPT-2's parts a GPT2LMHeadModel; other mixtures have no class
there and are refused. Neither class has further prediction heads: they are kept beside it, in mtp_heads.safetensors. Padding
rows of the vocabulary are left off. Special tokens typed in a text are found by transformers, while our encoder takes them
for text: strip them from what users type.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from stages.chat_template import special_id
from stages.checkpoint import Checkpoint, write_arrays
from stages.generate import open_checkpoint
from stages.program import command_main
from stages.special_tokens import END, PAD, ROLES, SEPARATOR, opener
from stages.text_files import write_text
from stages.tokenizer import Tokenizer

Weights = dict[str, np.ndarray]

DEFAULTS = {
    "format": "",
    "model": "sft",
    "tokenizer": "data/train_bpe/tokenizer.json",
    "output": "export/hf",
    "kind": "",
}
KINDS = {"pretrain": "base", "sft": "chat"}  # of the models that the stages make
MTP_HEADS_FILE = "mtp_heads.safetensors"
FORMAT = {"format": "pt"}  # which transformers asks of a safetensors file

# What each class is made of; heads that share keys and values in GPT-2 are looked at apart.
PARTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    "GPT2LMHeadModel": {
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "tied_head": True,
    },
}

# As stages/conversations.py renders: without any character between the parts. What the model learns stands between
# {% generation %} and {% endgeneration %}, from which transformers makes a mask of the assistant's tokens.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('expected a role of system, user, assistant, got ' + message['role']) -}}
    {%- elif message['role'] == 'system' and not loop.first -%}
        {{- raise_exception('expected a system message only as the first') -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
            {{- message['content'] + '<|end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def architecture(config: ModelConfig) -> str:
    """The class of transformers with these parts.

    Raises:
        ValueError: none has them; the message names the parts that the nearest class has otherwise.
    """
    wrong = {}
    for name, parts in PARTS.items():
        found = [
            f"model.{key}: {getattr(config, key)} ({part})"
            for key, part in parts.items()
            if getattr(config, key) != part
        ]
        if name == "GPT2LMHeadModel" and config.kv_heads != config.heads:
            found.append(f"model.kv_heads: {config.kv_heads} (model.heads = {config.heads})")
        wrong[name] = found
    nearest = min(wrong, key=lambda name: len(wrong[name]))
    if wrong[nearest]:
        expected = f"expected the parts of {nearest}, the nearest of {' and '.join(PARTS)}"
        raise ValueError(
            f"this model has no class in transformers: {', '.join(wrong[nearest])}; {expected}, in brackets"
        )
    return nearest


def llama_weights(weights: Mapping[str, np.ndarray], c: ModelConfig) -> Weights:
    """The weights by LlamaForCausalLM's names; both have linear weights as (outputs, inputs) and rope in two halves."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    out = {
        "model.embed_tokens.weight": weights["tok.weight"][: c.vocab_size],
        "model.norm.weight": weights["norm.weight"],
    }
    if not c.tied_head:
        out["lm_head.weight"] = weights["head.weight"][0, : c.vocab_size]
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = np.split(weights[f"{ours}qkv.weight"], [queries, queries + keys])
        gate, up = np.split(weights[f"{ours}up.weight"], 2)
        for name, array in (
            ("input_layernorm", weights[f"{ours}norm1.weight"]),
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", k),
            ("self_attn.v_proj", v),
            ("self_attn.o_proj", weights[f"{ours}proj.weight"]),
            ("post_attention_layernorm", weights[f"{ours}norm2.weight"]),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("mlp.down_proj", weights[f"{ours}down.weight"]),
        ):
            out[f"{theirs}{name}.weight"] = array
    return out


def gpt2_weights(weights: Mapping[str, np.ndarray], c: ModelConfig) -> Weights:
    """The weights by GPT2LMHeadModel's names, whose linear layers hold (inputs, outputs)."""
    out = {
        "transformer.wte.weight": weights["tok.weight"][: c.vocab_size],
        "transformer.wpe.weight": weights["pos.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    names = {"norm1": "ln_1", "qkv": "attn.c_attn", "proj": "attn.c_proj", "norm2": "ln_2"}
    names |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    for i in range(c.layers):
        for ours, theirs in names.items():
            out[f"transformer.h.{i}.{theirs}.weight"] = weights[f"blocks.{i}.{ours}.weight"].T
            out[f"transformer.h.{i}.{theirs}.bias"] = weights[f"blocks.{i}.{ours}.bias"]
    return out


def hf_config(c: ModelConfig, name: str) -> dict[str, Any]:
    """config.json, without the token ids."""
    both = {
        "architectures": [name],
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied_head,
    }
    if name == "LlamaForCausalLM":
        return {
            **both,
            "model_type": "llama",
            "hidden_size": c.dim,
            "intermediate_size": c.ffn,
            "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": c.context,
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_base,  # for readers older than rope_parameters
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        **both,
        "model_type": "gpt2",
        "n_embd": c.dim,
        "n_inner": c.ffn,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_positions": c.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def token_ids(special: Mapping[str, int]) -> dict[str, Any]:
    """Where texts begin, what fills a batch, and what ends a text: the next document of a base model, the end of a turn."""
    ids: dict[str, Any] = {"eos_token_id": [special[name] for name in (SEPARATOR, END) if name in special]}
    return ids | {
        key: special[name]
        for key, name in (("bos_token_id", SEPARATOR), ("pad_token_id", PAD))
        if name in special
    }


def tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """tokenizer_config.json; the chat template where the tokenizer has its tokens."""
    named = {"bos_token": SEPARATOR, "eos_token": SEPARATOR, "pad_token": PAD}
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{key: name for key, name in named.items() if name in tokenizer.special},
    }
    if {END, *map(opener, ROLES)} <= tokenizer.special.keys():
        content["chat_template"] = CHAT_TEMPLATE
    return content


def tokenizer_json(tokenizer: Tokenizer, *, begins_text: bool) -> dict[str, Any]:
    """tokenizer.json; with begins_text the separator stands in front of every text, as it stands in front of a document."""
    content: dict[str, Any] = json.loads(tokenizer.json)
    if begins_text:
        first = [{"SpecialToken": {"id": SEPARATOR, "type_id": number}} for number in (0, 1)]
        texts = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first[0], texts[0]],
            "pair": [first[0], texts[0], first[1], texts[1]],
            "special_tokens": {
                SEPARATOR: {
                    "id": SEPARATOR,
                    "ids": [special_id(tokenizer, SEPARATOR)],
                    "tokens": [SEPARATOR],
                },
            },
        }
    return content


def kind_of(model: str, kind: str) -> str:
    """base or chat: as given, else by the stage that makes the model; chat for a folder elsewhere.

    Raises:
        ValueError: the kind is neither.
    """
    if kind and kind not in KINDS.values():
        raise ValueError(f"kind: expected base or chat, got {kind}")
    return kind or KINDS.get(model) or KINDS.get(Path(model).resolve().parent.name) or "chat"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def export(checkpoint: Checkpoint, tokenizer: Tokenizer, output: Path, *, kind: str) -> str:
    """Writes the folder of a model of this kind, base or chat; returns the name of the class.

    Raises:
        ValueError: the model's parts have no class in transformers, or the folder cannot be written.
    """
    c, weights = checkpoint.config, checkpoint.weights
    name = architecture(c)
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise ValueError(
            f"output: {output} holds other files and is no earlier export; name an empty or new folder"
        )
    theirs = (llama_weights if name == "LlamaForCausalLM" else gpt2_weights)(weights, c)
    write_arrays(output / "model.safetensors", theirs, FORMAT)
    if c.mtp_heads > 1:
        # Head k of the array predicts the token k + 2 ahead: the model's own head is not among them.
        further = weights["head.weight"][0 if c.tied_head else 1 :, : c.vocab_size]
        write_arrays(output / MTP_HEADS_FILE, {"heads.weight": further}, FORMAT)
    else:
        (output / MTP_HEADS_FILE).unlink(missing_ok=True)  # of an earlier export into the same folder
    ids = token_ids(tokenizer.special)
    write_json(output / "config.json", hf_config(c, name) | ids)
    write_json(output / "generation_config.json", ids)
    write_json(output / "tokenizer_config.json", tokenizer_config(tokenizer, c.context))
    write_json(output / "tokenizer.json", tokenizer_json(tokenizer, begins_text=kind == "base"))
    return name


def run(argv: list[str]) -> None:
    """Exports what the command line names.

    Raises:
        ValueError: an argument is unknown, the model can't be had, or its parts have no class in transformers.
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
        raise ValueError(f"format: expected hf, got {chosen['format'] or 'none'}; give format=hf")
    kind = kind_of(chosen["model"], chosen["kind"])
    checkpoint, tokenizer = open_checkpoint(chosen["model"], Path(chosen["tokenizer"]))
    output = Path(chosen["output"])
    name = export(checkpoint, tokenizer, output, kind=kind)
    print(
        f"{output}: {name}, {checkpoint.config.vocab_size} tokens, exported as a {kind} model",
        file=sys.stderr,
    )


def main() -> None:
    """Runs the command; what its user can repair is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
