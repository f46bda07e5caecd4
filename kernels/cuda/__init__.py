"""The CUDA engine's operations: hand-written kernels, and for matrix products the library's or our own.

Each .cu file holds the kernels of one operation, the .py file beside it launches them. `CudaOps` is the set of them that the
model is written over, and the device that they run on.
"""

import cupy
import numpy as np

from kernels.config import ModelConfig, Numerics
from kernels.cpu.rope import rope_table
from kernels.cuda import embedding
from kernels.cuda.adamw import adamw
from kernels.cuda.attention.attention import (
    LARGEST_HEAD_DIM,
    attention_backward,
    attention_forward,
    attention_kernel,
    attention_workspace_bytes,
)
from kernels.cuda.bias import bias_backward, bias_forward
from kernels.cuda.cast import cast
from kernels.cuda.cross_entropy import cross_entropy_backward, cross_entropy_forward
from kernels.cuda.decode.decode_attention import decode_attention_forward
from kernels.cuda.decode.decode_step import decode_step, fused_rows
from kernels.cuda.embedding import embedding_backward, embedding_forward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.grad_norm import grad_norm
from kernels.cuda.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from kernels.cuda.matmul import cublaslt, matmul_fp8
from kernels.cuda.matmul.fp8 import fp8_rescale
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward
from kernels.cuda.matmul.matmul_fp8 import cast_weight, fp8_mlp_backward, fp8_mlp_forward, fp8_weight
from kernels.cuda.matmul.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.cuda.muon import muon
from kernels.cuda.rmsnorm import (
    residual_rmsnorm_backward,
    residual_rmsnorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from kernels.cuda.rope import rope_backward, rope_forward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array
from kernels.cuda.runtime.rows import LONGEST_ROW
from kernels.cuda.sample import sample, suppress_tokens
from kernels.cuda.swiglu import swiglu_backward, swiglu_forward
from kernels.cuda.weighted_sum import weighted_sum_forward
from kernels.fp8 import MULTIPLE

FP8_ARCH = 89  # the oldest with FP8 products


class CudaOps(Device):
    """Every operation of the model on one GPU.

    Args:
        numerics: precision, and which kernels make products and attention.

    Raises:
        ValueError: see Device; or the GPU is too old for FP8.
    """

    name = "cuda"
    dtype = FLOAT

    embedding_forward, embedding_backward = embedding_forward, embedding_backward
    rmsnorm_forward, rmsnorm_backward = rmsnorm_forward, rmsnorm_backward
    residual_rmsnorm_forward, residual_rmsnorm_backward = residual_rmsnorm_forward, residual_rmsnorm_backward
    layernorm_forward, layernorm_backward = layernorm_forward, layernorm_backward
    residual_layernorm_forward, residual_layernorm_backward = (
        residual_layernorm_forward,
        residual_layernorm_backward,
    )
    matmul_forward, matmul_backward = matmul_forward, matmul_backward
    matmul_gelu_forward, matmul_gelu_backward = matmul_gelu_forward, matmul_gelu_backward
    bias_forward, bias_backward = bias_forward, bias_backward
    rope_forward, rope_backward = rope_forward, rope_backward
    attention_forward, attention_backward = attention_forward, attention_backward
    decode_attention_forward = decode_attention_forward
    decode_step = decode_step
    gelu_forward, gelu_backward = gelu_forward, gelu_backward
    swiglu_forward, swiglu_backward = swiglu_forward, swiglu_backward
    cross_entropy_forward, cross_entropy_backward = cross_entropy_forward, cross_entropy_backward
    weighted_sum_forward = weighted_sum_forward
    grad_norm = grad_norm
    adamw, muon = adamw, muon
    sample, suppress_tokens = sample, suppress_tokens
    cast = cast
    fp8_weight, cast_weight, fp8_rescale = fp8_weight, cast_weight, fp8_rescale
    fp8_mlp_forward, fp8_mlp_backward = fp8_mlp_forward, fp8_mlp_backward

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.fp8 = (
            numerics.precision == "fp8"
        )  # products whose weight is an fp8_weight; all else is as with bf16
        if self.fp8 and int(self.arch[3:]) < FP8_ARCH:
            raise ValueError(
                f"numerics.precision: fp8 needs a GPU of sm_{FP8_ARCH} or later, {self.model} is {self.arch}; set it to bf16"
            )
        self.precision = "bf16" if self.fp8 else numerics.precision
        self.matmul, self.attention, self.deterministic = (
            numerics.matmul,
            numerics.attention,
            numerics.deterministic,
        )
        self.storage = BF16 if self.precision == "bf16" else FLOAT

    def measure(self, measuring: bool) -> None:
        """Whether casts to FP8 take the scales of now from here on, as those of an update before are not known."""
        self.measuring = measuring

    def fused_rows(self, config: ModelConfig) -> int:
        """Rows up to which decode_step takes the place of a pass by the other operations."""
        return fused_rows(self, self.storage, config)

    def workspace_bytes(self, config: ModelConfig, rows: int) -> int:
        """The most that one operation needs while it runs.

        Raises:
            ValueError: the kernels' rows or heads are not made for such a model.
        """
        if config.head_dim > LARGEST_HEAD_DIM:
            raise ValueError(
                f"model.dim / model.heads: attention on the GPU takes heads of at most {LARGEST_HEAD_DIM}, got "
                f"{config.head_dim}; set more model.heads, or runtime.device to cpu"
            )
        if config.dim > (LONGEST_ROW if config.dim % 8 == 0 else LONGEST_ROW // 2):
            raise ValueError(
                f"model.dim: norms on the GPU take rows of at most {LONGEST_ROW}, half of it where 8 does not divide them, got "
                f"{config.dim}; set it smaller, or runtime.device to cpu"
            )
        c, chunks = config, -(-rows // embedding.CHUNK)
        hidden, qkv = c.ffn * (2 if c.mlp == "swiglu" else 1), (c.heads + 2 * c.kv_heads) * c.head_dim
        widest = max(hidden, qkv)
        linears = ((qkv, c.dim), (c.dim, c.dim), (hidden, c.dim), (c.dim, c.ffn)) if self.fp8 else ()
        for width in {width for linear in linears for width in linear}:
            if width % MULTIPLE:
                raise ValueError(
                    f"numerics.precision: fp8 takes linear layers whose widths {MULTIPLE} divides (model.dim, ffn, heads and "
                    f"kv_heads make them), one is {width}; set it to bf16"
                )
        needs = (
            cublaslt.WORKSPACE_BYTES,
            attention_workspace_bytes(
                self, self.storage, -(-rows // c.context), c.context, c.heads, c.kv_heads, c.head_dim
            ),
            4 * rows * c.heads * (2 + c.head_dim),  # the shares of cached attention, where all rows are new
            3
            * 4
            * c.dim
            * 8
            * self.processors,  # partial sums of a norm's two gradients and of a bias before it
            4 * (widest + 256) * 2 * self.processors,  # and of a bias's
            4 * c.ffn * 4 * -(-rows // 128),  # and of one's whose GELU a product takes along
            *(matmul_fp8.workspace_bytes(rows, *linear) for linear in linears),
            4 * (chunks * c.padded_vocab + 3)
            + 16 * c.padded_vocab
            + 4 * rows,  # the embedding's lists of rows
            4 * (chunks * c.context + 3) + 16 * c.context + 4 * rows,
        )
        return max(needs) + 16 * 256

    def rope_table(self, context: int, head_dim: int, base: float) -> Array:
        """kernels.cpu.rope.rope_table on the GPU, fp32."""
        table = rope_table(context, head_dim, base).astype(np.float32)
        on_gpu = self.allocate(table.nbytes).view(np.float32).reshape(table.shape)
        self.upload(on_gpu, table)
        return on_gpu

    def describe(self, config: ModelConfig) -> str:
        """The device in words: its name, precision, the kernels that such a model gets, and versions."""
        kernels = f"matmul {self.matmul}, attention {attention_kernel(self, self.storage, config.head_dim)}"
        library = f", cuBLASLt {cublaslt.version()}" if self.matmul == "cublaslt" else ""
        precision = "fp8" if self.fp8 else self.precision
        return f"{self.model}, {precision}, {kernels}, CuPy {cupy.__version__}{library}"
