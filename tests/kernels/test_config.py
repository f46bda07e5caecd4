"""ModelConfig and Numerics: what they refuse, and what they derive."""

import dataclasses
from typing import Any, get_args

import pytest

from kernels.config import Mlp, ModelConfig, Norm, Numerics, Position

VALID: dict[str, Any] = {
    "vocab_size": 512, "layers": 2, "heads": 4, "kv_heads": 2, "dim": 32, "ffn": 24, "context": 16
}  # fmt: skip


# A size of zero that is only noticed as an empty array deep inside, or a message that does not name the key.
@pytest.mark.parametrize("name", ["layers", "heads", "kv_heads", "dim", "ffn", "context", "mtp_heads"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{name}: expected at least 1, got 0$"):
        ModelConfig(**{**VALID, name: 0})


# Each combination that could not be computed, with the key and what to set in the message.
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 65537}, r"^vocab_size: expected 1 to 65536 \(shards hold uint16\), got 65537$"),
        ({"vocab_size": 0}, "^vocab_size: expected 1 to 65536"),
        (
            {"norm": "batchnorm"},
            rf"^model\.norm: expected one of {', '.join(get_args(Norm))}, got 'batchnorm'$",
        ),
        (
            {"position": "alibi"},
            rf"^model\.position: expected one of {', '.join(get_args(Position))}, got 'alibi'$",
        ),
        ({"mlp": "relu"}, rf"^model\.mlp: expected one of {', '.join(get_args(Mlp))}, got 'relu'$"),
        ({"dim": 30}, r"^model\.dim: expected a multiple of model\.heads = 4, got 30$"),
        ({"kv_heads": 3}, r"^model\.heads: expected a multiple of model\.kv_heads = 3, got 4$"),
        ({"dim": 36}, "^model.dim / model.heads: rope rotates pairs and needs an even head width, got 9$"),
        ({"mtp_heads": 17}, r"^model\.mtp_heads: expected at most model\.context = 16, got 17$"),
        ({"norm_eps": 0.0}, r"^model\.norm_eps: expected a positive number, got 0\.0$"),
        ({"norm_eps": float("nan")}, r"^model\.norm_eps: expected a positive number, got nan$"),
        ({"qk_norm": "l2"}, r"^model\.qk_norm: expected one of none, weighted, unweighted, got 'l2'$"),
        (
            {"qk_norm": "weighted", "position": "learned", "dim": 36},
            "^model.dim / model.heads: model.qk_norm normalises pairs and needs an even head width, got 9",
        ),
        (
            {"logit_softcap": -1.0},
            r"^model\.logit_softcap: expected a number of at least 0 \(0: none\), got -1\.0$",
        ),
        (
            {"logit_softcap": float("inf")},
            r"^model\.logit_softcap: expected a number of at least 0 \(0: none\), got inf",
        ),
        ({"rope_base": 1.0}, r"^model\.rope_base: expected a number above 1, got 1\.0$"),
    ],
)
def test_impossible_models(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**VALID, **values})


# The limits themselves are allowed; an odd head width is, where nothing is rotated.
def test_limits_are_allowed() -> None:
    ModelConfig(**{**VALID, "vocab_size": 65536, "mtp_heads": 16})
    assert ModelConfig(**{**VALID, "dim": 36, "position": "learned"}).head_dim == 9


# Whole tiles of 128, and not one more where the vocabulary fills them.
@pytest.mark.parametrize(
    ("vocab_size", "padded"), [(1, 128), (127, 128), (128, 128), (129, 256), (50257, 50304)]
)
def test_padded_vocabulary(vocab_size: int, padded: int) -> None:
    assert ModelConfig(**{**VALID, "vocab_size": vocab_size}).padded_vocab == padded


# A field that model.json loses would come back as its default: another model.
def test_dict_makes_the_same_model() -> None:
    changed = ModelConfig(
        **{
            **VALID,
            "norm": "layernorm",
            "bias": True,
            "tied_head": True,
            "rope_base": 5e5,
            "mtp_heads": 3,
            "qk_norm": "unweighted",
            "logit_softcap": 15.0,
        }
    )
    assert ModelConfig(**changed.to_dict()) == changed
    assert set(changed.to_dict()) == {field.name for field in dataclasses.fields(ModelConfig)}


# A configuration that changes under the engine that was built from it.
def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig(**VALID).dim = 64  # type: ignore[misc]


# A misspelt precision that silently means the default.
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "fp16"}, r"^numerics\.precision: expected one of fp32, tf32, bf16, fp8, got 'fp16'$"),
        (
            {"precision": "fp8", "matmul": "custom"},
            r"^numerics\.matmul: expected cublaslt with precision fp8, got custom; set it to cublaslt$",
        ),
        (
            {"precision": "fp8", "recompute": "mlp"},
            r"^numerics\.recompute: expected none with precision fp8, .*; set it to none$",
        ),
        ({"recompute": "all"}, r"^numerics\.recompute: expected one of none, mlp, got 'all'$"),
    ],
)
def test_unknown_numerics(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Numerics(**values)
