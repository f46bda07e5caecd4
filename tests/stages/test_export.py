"""The command export: files, names and shapes of both classes, and refusals. tests/parity compares logits
with PyTorch.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from stages import export, hf_format
from stages.checkpoint import Checkpoint, save
from stages.tokenizer import Tokenizer
from stages.tokenizer.file_format import BYTE_ORDER, Vocabulary
from tests.stages.scripted_engine import TOKENIZER

VOCAB = TOKENIZER.vocab_size
EULER = ModelConfig(VOCAB, layers=2, heads=3, kv_heads=1, dim=12, ffn=10, context=7, mtp_heads=3)
GPT2 = replace(
    EULER,
    kv_heads=3,
    mtp_heads=1,
    norm="layernorm",
    position="learned",
    mlp="gelu",
    bias=True,
    tied_head=True,
)


def checkpoint_of(config: ModelConfig) -> Checkpoint:
    """A model in which no two numbers are equal, so that no mixed-up tensor goes unseen."""
    weights = Engine(config, Numerics(), micro_batch=1, training=False).weights()
    first = 0
    for name, array in weights.items():
        weights[name] = np.arange(first, first + array.size, dtype=np.float32).reshape(array.shape)
        first += array.size
    return Checkpoint(weights, config, TOKENIZER.sha256)


def exported(config: ModelConfig, output: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], Checkpoint]:
    """The weights and config.json that a model's export holds, and the model."""
    made = checkpoint_of(config)
    export.export(made, TOKENIZER, output, kind="chat")
    return (
        load_file(output / "model.safetensors"),
        json.loads((output / "config.json").read_text(encoding="utf-8")),
        made,
    )


def run_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["export", *argv])
    try:
        export.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_euler_parts_are_llamas(tmp_path: Path) -> None:
    """Would catch rows of q, k, v, gate and up split in the wrong place, padding kept, and a tensor left
    out.
    """
    tensors, config, made = exported(EULER, tmp_path)
    ours = made.weights
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    layers = {name for i in range(2) for name in (
        f"model.layers.{i}.input_layernorm.weight", f"model.layers.{i}.post_attention_layernorm.weight",
        *(f"model.layers.{i}.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"model.layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    )}  # fmt: skip
    assert tensors.keys() == layers | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    block = "model.layers.1."
    stacked = [tensors[f"{block}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert [array.shape for array in stacked] == [(12, 12), (4, 12), (4, 12)]
    assert np.array_equal(np.concatenate(stacked), ours["blocks.1.qkv.weight"])
    halves = [tensors[f"{block}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert np.array_equal(np.concatenate(halves), ours["blocks.1.up.weight"]) and halves[0].shape == (10, 12)
    assert np.array_equal(tensors[f"{block}mlp.down_proj.weight"], ours["blocks.1.down.weight"])
    assert np.array_equal(tensors[f"{block}self_attn.o_proj.weight"], ours["blocks.1.proj.weight"])
    assert np.array_equal(tensors[f"{block}post_attention_layernorm.weight"], ours["blocks.1.norm2.weight"])
    assert np.array_equal(tensors["model.embed_tokens.weight"], ours["tok.weight"][:VOCAB])
    assert np.array_equal(tensors["lm_head.weight"], ours["head.weight"][0, :VOCAB])
    assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (1, 4, False)


def test_qk_norm_with_a_weight_is_a_qwen3(tmp_path: Path) -> None:
    """Would catch norms that are exchanged or left out, and a class that ignores them."""
    tensors, config, made = exported(replace(EULER, qk_norm="weighted"), tmp_path)
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["model_type"] == "qwen3"
    for norm in ("q_norm", "k_norm"):
        theirs = tensors[f"model.layers.1.self_attn.{norm}.weight"]
        assert theirs.shape == (4,) and np.array_equal(theirs, made.weights[f"blocks.1.{norm}.weight"])


def test_gpt2_parts_are_gpt2s(tmp_path: Path) -> None:
    """Would catch linear weights that are not transposed, which square ones hide, and a second copy of the
    tied head.
    """
    tensors, config, made = exported(GPT2, tmp_path)
    ours, block = made.weights, "transformer.h.0."
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["model_type"] == "gpt2"
    assert len(tensors) == 2 * 12 + 4 and not [name for name in tensors if "lm_head" in name]
    for theirs, name in (
        ("attn.c_attn", "qkv"),
        ("attn.c_proj", "proj"),
        ("mlp.c_fc", "up"),
        ("mlp.c_proj", "down"),
    ):
        assert np.array_equal(tensors[f"{block}{theirs}.weight"], ours[f"blocks.0.{name}.weight"].T), name
        assert np.array_equal(tensors[f"{block}{theirs}.bias"], ours[f"blocks.0.{name}.bias"]), name
    assert np.array_equal(tensors[f"{block}ln_2.bias"], ours["blocks.0.norm2.bias"])
    assert np.array_equal(tensors["transformer.wte.weight"], ours["tok.weight"][:VOCAB])
    assert np.array_equal(tensors["transformer.wpe.weight"], ours["pos.weight"])
    assert (config["n_inner"], config["n_positions"], config["activation_function"]) == (10, 7, "gelu_new")
    assert config["tie_word_embeddings"] is True and config["attn_pdrop"] == 0


@pytest.mark.parametrize("vocab_size", [256, 300])
def test_padding_is_cut_whatever_there_is_of_it(vocab_size: int, tmp_path: Path) -> None:
    """Would catch a slice [:-padding], which removes all rows if there is no padding."""
    config = replace(EULER, vocab_size=vocab_size, tied_head=True)
    tensors, content, made = exported(config, tmp_path)
    assert tensors["model.embed_tokens.weight"].shape == (vocab_size, 12) and "lm_head.weight" not in tensors
    assert content["vocab_size"] == vocab_size and content["tie_word_embeddings"] is True
    further = load_file(tmp_path / export.MTP_HEADS_FILE)["heads.weight"]
    assert np.array_equal(further, made.weights["head.weight"][:, :vocab_size]) and further.shape == (
        2,
        vocab_size,
        12,
    )


def test_mtp_heads_have_their_own_file(tmp_path: Path) -> None:
    """Would catch head 0 among them, and heads that remain from an earlier export."""
    _, _, made = exported(EULER, tmp_path)
    further = load_file(tmp_path / export.MTP_HEADS_FILE)["heads.weight"]
    assert np.array_equal(further, made.weights["head.weight"][1:, :VOCAB])
    exported(replace(EULER, mtp_heads=1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip


def test_token_ids_and_chat_template(tmp_path: Path) -> None:
    """Would catch a pad token that ends texts, an answer that never ends, and a template without a mask of
    the answers.
    """
    exported(EULER, tmp_path)
    ids = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    separator, end, pad = (TOKENIZER.special[name] for name in ("<|endoftext|>", "<|end|>", "<|pad|>"))
    assert ids == {"eos_token_id": [separator, end], "bos_token_id": separator, "pad_token_id": pad}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (
        config["pad_token"] not in (config["eos_token"], config["bos_token"])
        and config["model_max_length"] == 7
    )
    assert (
        "{%- generation -%}" in config["chat_template"] and "{%- endgeneration -%}" in config["chat_template"]
    )
    assert Tokenizer.load(tmp_path / "tokenizer.json").sha256 == TOKENIZER.sha256


def test_a_tokenizer_without_chat_tokens_has_no_template() -> None:
    """Would catch a template whose tokens become ordinary text, and ids of tokens that aren't there."""
    plain = Tokenizer(
        Vocabulary([bytes([b]) for b in BYTE_ORDER], [], {}).with_special(["<|endoftext|>"], "test")
    )
    content = hf_format.tokenizer_config(plain, 7)
    assert "chat_template" not in content and "pad_token" not in content
    assert hf_format.token_ids(plain.special) == {"eos_token_id": [256], "bos_token_id": 256}


def test_same_model_same_bytes_in_files_that_all_may_read(tmp_path: Path) -> None:
    """Would catch dates, paths or hash order in the files, and leftover files."""
    for name in ("a", "b"):
        exported(EULER, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    with safe_open(tmp_path / "a" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {
            "format": "pt"
        }  # without it, older releases of transformers refuse the file


@pytest.mark.parametrize(
    ("config", "change", "closest"),
    [
        (replace(EULER, norm="layernorm"), "model.norm=rmsnorm (is layernorm)", "LlamaForCausalLM"),
        (replace(EULER, mlp="gelu"), "model.mlp=swiglu (is gelu)", "LlamaForCausalLM"),
        (replace(EULER, bias=True), "model.bias=false (is true)", "LlamaForCausalLM"),
        (replace(EULER, position="learned"), "model.position=rope (is learned)", "LlamaForCausalLM"),
        (replace(EULER, qk_norm="unweighted"), "model.qk_norm=none (is unweighted)", "LlamaForCausalLM"),
        (replace(EULER, logit_softcap=15.0), "model.logit_softcap=0.0 (is 15.0)", "LlamaForCausalLM"),
        (replace(GPT2, position="rope"), "model.position=learned (is rope)", "GPT2LMHeadModel"),
        (replace(GPT2, bias=False), "model.bias=true (is false)", "GPT2LMHeadModel"),
        (replace(GPT2, tied_head=False), "model.tied_head=true (is false)", "GPT2LMHeadModel"),
        (replace(GPT2, kv_heads=1), "model.kv_heads=3 (is 1)", "GPT2LMHeadModel"),
    ],
)
def test_other_mixtures_are_refused(
    config: ModelConfig,
    change: str,
    closest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """Would catch a model that loads but computes something else, because its class has other parts."""
    save(tmp_path / "model", checkpoint_of(config).weights, config, TOKENIZER.sha256)
    TOKENIZER.save(tmp_path / "tokenizer.json")
    arguments = [
        f"model={tmp_path / 'model'}",
        f"tokenizer={tmp_path / 'tokenizer.json'}",
        f"output={tmp_path / 'out'}",
    ]
    assert run_main(monkeypatch, "format=hf", *arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no class of transformers matches this model; ") and error.count("\n") == 1
    assert error.endswith(f"train with {change}\n") and f"the closest is {closest}." in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "format: expected hf, got none; set format=hf"),
        (["format=gguf"], "format: expected hf, got gguf"),
        (["format=hf", "to=here"], "to=here: expected format=..., model=..., tokenizer=..., output=..."),
        (["format=hf", "model="], "model=: expected format=..."),
        (["format=hf"], "file not found; run `make repro`"),
    ],
)
def test_arguments_are_validated(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Would catch an ignored option, and a traceback for a missing model."""
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, *argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# The tokenizer of a base model's export begins every text with the separator; it must stay the tokenizer of
# its checkpoint.
def test_the_separator_begins_the_texts_of_a_base_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for kind, first in (("base", [TOKENIZER.special["<|endoftext|>"]]), ("chat", [])):
        export.export(checkpoint_of(EULER), TOKENIZER, tmp_path / kind, kind=kind)
        path = tmp_path / kind / "tokenizer.json"
        theirs = tokenizers.Tokenizer.from_file(str(path))
        assert theirs.encode("some text").ids == [*first, *TOKENIZER.encode("some text").tolist()]
        assert (
            theirs.encode("some text", add_special_tokens=False).ids == TOKENIZER.encode("some text").tolist()
        )
        assert Tokenizer.load(path).sha256 == TOKENIZER.sha256
    TOKENIZER.save(tmp_path / "tokenizer.json")
    assert (tmp_path / "chat" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("model", "given", "kind"),
    [
        ("pretrain", "", "base"),
        ("sft", "", "chat"),
        ("data/pretrain/checkpoint", "", "base"),
        ("data/sft/checkpoint", "", "chat"),
        ("models/first", "base", "base"),
        ("sft", "base", "base"),
        ("models/first", "", "chat"),
        ("sft", "other", None),
    ],
)
def test_kind_of_a_model(model: str, given: str, kind: str | None) -> None:
    """Would catch a chat model exported with a separator before texts, because its folder has another
    name.
    """
    if kind is None:
        with pytest.raises(ValueError, match=r"^kind: expected base or chat, got other$"):
            export.kind_of(model, given)
    else:
        assert export.kind_of(model, given) == kind
