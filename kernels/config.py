"""The two settings of an engine: what the model is made of, and how its numbers are computed.

An architecture is a choice of parts, not a class. GPT-2 is layernorm + learned + gelu + bias + tied head. The
euler models are rmsnorm + rope + swiglu + grouped key/value heads + several prediction heads. Any mixture
trains as well. What a part does is its entry in kernels/parts/.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned"]
Mlp = Literal["swiglu", "gelu"]
QkNorm = Literal["none", "weighted", "unweighted"]
Precision = Literal["fp32", "tf32", "bf16", "fp8"]
Recompute = Literal["none", "mlp"]
Matmul = Literal["cublaslt", "custom"]
Attention = Literal["hopper", "mma", "scalar"]

# The embedding and each head have a multiple of this many rows, so that matmuls over the vocabulary have
# whole tiles. Padding rows start at zero and get no gradient, so they stay zero.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of one transformer.

    Args:
        vocab_size: token ids are 0 .. vocab_size - 1; at most 65,536, since shards hold uint16.
        layers: transformer blocks.
        heads: query heads; dim is divided among them.
        kv_heads: key and value heads, each shared by heads / kv_heads query heads.
        dim: width of the residual stream.
        ffn: width of the MLP's hidden layer.
        context: the most tokens the model sees at once.
        mtp_heads: prediction heads; head k predicts the token k + 1 ahead.
        norm, position, mlp: the parts.
        qk_norm: RMSNorm of each query and key head before the rotation, with a learned weight that the heads
            share, or without; with norm_eps.
        logit_softcap: logits z become logit_softcap * tanh(z / logit_softcap); 0: they stay.
        bias: whether every linear layer adds a bias (the heads never do).
        tied_head: whether head 0 is the token embedding itself.
        rope_base: base of RoPE's geometric frequencies, unused with learned positions.
        norm_eps: added to the variance or mean square inside a norm.

    Raises:
        ValueError: a value is impossible; the message names it and what to set.
    """

    vocab_size: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    context: int
    mtp_heads: int = 1
    norm: Norm = "rmsnorm"
    position: Position = "rope"
    mlp: Mlp = "swiglu"
    bias: bool = False
    tied_head: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm: QkNorm = "none"
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "dim", "ffn", "context", "mtp_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.vocab_size <= 65536:
            raise ValueError(f"vocab_size: expected 1 to 65536 (shards hold uint16), got {self.vocab_size}")
        for name, kind in (("norm", Norm), ("position", Position), ("mlp", Mlp), ("qk_norm", QkNorm)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"model.{name}: expected one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.dim % self.heads:
            raise ValueError(f"model.dim: expected a multiple of model.heads = {self.heads}, got {self.dim}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads: expected a multiple of model.kv_heads = {self.kv_heads}, got {self.heads}"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(
                "model.dim / model.heads: rope rotates pairs and needs an even head width, got "
                f"{self.head_dim}"
            )
        if self.qk_norm != "none" and self.head_dim % 2:
            raise ValueError(
                "model.dim / model.heads: model.qk_norm normalises pairs and needs an even head width, got "
                f"{self.head_dim}; set model.qk_norm to none, or another model.heads"
            )
        if self.mtp_heads > self.context:
            raise ValueError(
                f"model.mtp_heads: expected at most model.context = {self.context}, got {self.mtp_heads}"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"model.norm_eps: expected a positive number, got {self.norm_eps}")
        if not 0 <= self.logit_softcap < math.inf:
            raise ValueError(
                f"model.logit_softcap: expected a number of at least 0 (0: none), got {self.logit_softcap}"
            )
        if not self.rope_base > 1:
            raise ValueError(f"model.rope_base: expected a number above 1, got {self.rope_base}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def qkv_heads(self) -> int:
        """Query, key and value heads together."""
        return self.heads + 2 * self.kv_heads

    @property
    def kv_dim(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        """Width of queries, keys and values together."""
        return self.qkv_heads * self.head_dim

    @property
    def up_dim(self) -> int:
        """Outputs of the MLP's first linear layer: gate and up of swiglu together."""
        return self.ffn * (2 if self.mlp == "swiglu" else 1)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each linear layer of a block, in the order of the forward pass."""
        return {
            "qkv": (self.qkv_dim, self.dim),
            "proj": (self.dim, self.dim),
            "up": (self.up_dim, self.dim),
            "down": (self.dim, self.ffn),
        }

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and of each head: vocab_size rounded up to VOCAB_MULTIPLE."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as model.json holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Numerics:
    """How numbers are held, multiplied and kept: all settings that can change a bit of the result.

    Args:
        precision: fp32; tf32: fp32 arrays, matmul operands rounded to 10 bits of mantissa; bf16: weights and
            activations in bf16, residual stream, master weights, gradients, moments, statistics and losses in
            fp32; fp8: bf16, but the matmuls of the blocks' linear layers have 8-bit operands in training. The
            CPU engine has fp32 only.
        matmul: cublaslt: the library, each shape by its fastest algorithm; custom: the kernel of this
            project. GPU only.
        attention: hopper: wgmma; mma: the tensor cores of any GPU; scalar: the readable kernel. A kernel that
            does not support the precision or head width falls back to the next. GPU only.
        recompute: mlp: the backward pass recomputes an MLP's hidden activations instead of keeping them.
        deterministic: same configuration, same device, same bits. If false, the Hopper attention kernel adds
            up dq in the order in which blocks finish.

    Raises:
        ValueError: a value is unknown, or does not go with the precision.
    """

    precision: Precision = "fp32"
    matmul: Matmul = "cublaslt"
    attention: Attention = "hopper"
    recompute: Recompute = "none"
    deterministic: bool = True

    def __post_init__(self) -> None:
        choices = {"precision": Precision, "matmul": Matmul, "attention": Attention, "recompute": Recompute}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"numerics.{name}: expected one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.precision == "fp8" and self.matmul != "cublaslt":
            raise ValueError(
                f"numerics.matmul: expected cublaslt with precision fp8, got {self.matmul}; set it to "
                "cublaslt"
            )
        if self.precision == "fp8" and self.recompute != "none":
            raise ValueError(
                "numerics.recompute: expected none with precision fp8, which keeps hidden activations in 8 "
                "bits; set it to none"
            )
