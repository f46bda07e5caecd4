"""What a model is made of and how its numbers are computed: two frozen, validated dataclasses.

An architecture is a choice of parts, not a class: GPT-2 is layernorm + learned + gelu + bias + tied head, the euler models
are rmsnorm + rope + swiglu + grouped key/value heads + several prediction heads, and any mixture of the two trains as well.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned"]
Mlp = Literal["swiglu", "gelu"]
Precision = Literal["fp32", "tf32", "bf16", "fp8"]
Recompute = Literal["none", "mlp"]
Matmul = Literal["cublaslt", "custom"]
Attention = Literal["hopper", "mma", "scalar"]
Optimizer = Literal["adamw", "muon"]

# Rows of the embedding and of each head are padded to a multiple of this, so that a tensor-core product over the
# vocabulary has whole tiles. Padding rows are zero at the start and receive no gradient, so they stay zero.
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
        context: most tokens the model sees at once.
        mtp_heads: prediction heads; head k predicts the token k + 1 ahead.
        norm, position, mlp: the parts.
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

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "dim", "ffn", "context", "mtp_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}: expected at least 1, got {getattr(self, name)}")
        if not 1 <= self.vocab_size <= 65536:
            raise ValueError(f"vocab_size: expected 1 to 65536 (shards hold uint16), got {self.vocab_size}")
        for name, kind in (("norm", Norm), ("position", Position), ("mlp", Mlp)):
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
                f"model.dim / model.heads: rope rotates pairs and needs an even head width, got {self.head_dim}"
            )
        if self.mtp_heads > self.context:
            raise ValueError(
                f"model.mtp_heads: expected at most model.context = {self.context}, got {self.mtp_heads}"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"model.norm_eps: expected a positive number, got {self.norm_eps}")
        if not self.rope_base > 1:
            raise ValueError(f"model.rope_base: expected a number above 1, got {self.rope_base}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and of each head: vocab_size rounded up to VOCAB_MULTIPLE."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, as model.json holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Numerics:
    """All that can change a bit of the result: how numbers are held, multiplied and kept.

    Args:
        precision: fp32; tf32, fp32 arrays whose products, those of attention too, round their factors to 10 bits; bf16,
            weights and activations of 16 bits beside an fp32 stream, master weights, gradients, moments, statistics and losses;
            or fp8, bf16 but for the products of the blocks' linear layers in training, whose factors have 8 bits and a scale.
            The CPU engine computes in fp32 only.
        matmul: cublaslt, the library's product, each shape by its fastest algorithm; or own, the kernel written here. GPU only.
        attention: hopper, on that GPU's tensor cores, mma, on any's, each where precision and head width allow, else the next; or
            scalar, the readable one. GPU only.
        recompute: "mlp" computes an MLP's hidden activations again in the backward pass instead of keeping them.
        deterministic: the same bits for the same configuration on the same device. False lets hopper's attention add up dq in
            the order in which its blocks come.

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
                    f"numerics.{name}: expected one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if self.precision == "fp8" and self.matmul != "cublaslt":
            raise ValueError(
                f"numerics.matmul: fp8 has the library's products alone, got {self.matmul}; set it to cublaslt"
            )
        if self.precision == "fp8" and self.recompute != "none":
            raise ValueError(
                "numerics.recompute: fp8 keeps hidden activations in 8 bits and makes none again; set it to none"
            )
