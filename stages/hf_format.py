"""The format of Hugging Face's transformers: class, names of the weights, configuration, tokenizer and chat
template.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.config import ModelConfig
from kernels.parts import QK_NORMS
from stages.chat_template import special_id
from stages.special_tokens import END, PAD, ROLES, SEPARATOR, opener
from stages.tokenizer import Tokenizer

Weights = dict[str, np.ndarray]

# The parts of each class. `architecture` also checks that GPT-2 has no grouped KV heads.
LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "logit_softcap": 0.0}
PARTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA | {"qk_norm": "none"},
    "Qwen3ForCausalLM": LLAMA | {"qk_norm": "weighted"},
    "GPT2LMHeadModel": {
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "tied_head": True,
        "qk_norm": "none",
        "logit_softcap": 0.0,
    },
}

# The template of stages/chat_template.py, without any character between its parts. From {% generation %}
# blocks transformers makes a mask of the assistant's tokens: those the model was trained to write.
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
        ValueError: there is none; the message names the closest class and what to change.
    """
    changes = {}
    for name, parts in PARTS.items():
        own = dict(parts)
        if name == "GPT2LMHeadModel":
            own["kv_heads"] = config.heads
        changes[name] = [
            f"model.{key}={str(part).lower()} (is {str(getattr(config, key)).lower()})"
            for key, part in own.items()
            if getattr(config, key) != part
        ]
    closest = min(changes, key=lambda name: len(changes[name]))
    if changes[closest]:
        raise ValueError(
            f"no class of transformers matches this model; the closest is {closest}. To export, train with "
            f"{', '.join(changes[closest])}"
        )
    return closest


def llama_weights(weights: Mapping[str, np.ndarray], c: ModelConfig) -> Weights:
    """The weights by the names of LlamaForCausalLM and Qwen3ForCausalLM. Like ours, their linear weights are
    (outputs, inputs), and rope rotates halves.
    """
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
        for name in QK_NORMS[c.qk_norm].parameters:
            out[f"{theirs}self_attn.{name}.weight"] = weights[f"{ours}{name}.weight"]
    return out


def gpt2_weights(weights: Mapping[str, np.ndarray], c: ModelConfig) -> Weights:
    """The weights by the names of GPT2LMHeadModel, whose linear layers store (inputs, outputs)."""
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
    """The content of config.json, without the token ids."""
    both = {
        "architectures": [name],
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied_head,
    }
    if name != "GPT2LMHeadModel":
        return {
            **both,
            "model_type": {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[name],
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
    """Ids of the beginning, the padding and the end of a text. A text ends with a new document or the end of
    a turn.
    """
    ids: dict[str, Any] = {"eos_token_id": [special[name] for name in (SEPARATOR, END) if name in special]}
    return ids | {
        key: special[name]
        for key, name in (("bos_token_id", SEPARATOR), ("pad_token_id", PAD))
        if name in special
    }


def tokenizer_config(tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json; with the chat template if the tokenizer has its tokens."""
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
    """The content of tokenizer.json; with begins_text the separator is put before every text, as in
    training.
    """
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
