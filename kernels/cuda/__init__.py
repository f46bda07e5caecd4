"""The operations on the GPU: hand-written kernels. Matmuls run in cuBLASLt or in our own kernels.

A .cu file holds the kernels of one operation. The .py file of the same name launches them. Operations with
several files have a folder: attention/, matmul/ and decode/. include/ holds shared headers. runtime/ holds
the code that all launchers use. `CudaOps` collects the operations for the model. It is also the device that
they run on.
"""

import sys

import cupy
import numpy as np

from kernels.config import ModelConfig, Numerics
from kernels.cpu.rope import rope_table
from kernels.cuda.adamw import adamw
from kernels.cuda.attention.attention import attention_backward, attention_forward, attention_kernel
from kernels.cuda.bias import bias_backward, bias_forward
from kernels.cuda.cast import cast
from kernels.cuda.cross_entropy import cross_entropy_backward, cross_entropy_forward
from kernels.cuda.decode.decode_attention import decode_attention_forward
from kernels.cuda.decode.decode_step import decode_step, decode_step_rows
from kernels.cuda.embedding import embedding_backward, embedding_forward
from kernels.cuda.gelu import gelu_backward, gelu_forward
from kernels.cuda.grad_norm import CHUNK, grad_norm, square_sums
from kernels.cuda.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)
from kernels.cuda.matmul import cublaslt
from kernels.cuda.matmul.fp8 import fp8_rescale
from kernels.cuda.matmul.matmul import matmul_backward, matmul_forward
from kernels.cuda.matmul.matmul_fp8 import cast_weight, fp8_mlp_backward, fp8_mlp_forward, fp8_weight
from kernels.cuda.matmul.matmul_gelu import matmul_gelu_backward, matmul_gelu_forward
from kernels.cuda.muon import muon
from kernels.cuda.qk_norm import qk_norm_backward, qk_norm_forward
from kernels.cuda.rmsnorm import (
    residual_rmsnorm_backward,
    residual_rmsnorm_forward,
    rmsnorm_backward,
    rmsnorm_forward,
)
from kernels.cuda.rope import rope_backward, rope_forward
from kernels.cuda.runtime.device import Device
from kernels.cuda.runtime.launch import BF16, FLOAT, Array
from kernels.cuda.sample import sample, suppress_tokens
from kernels.cuda.swiglu import swiglu_backward, swiglu_forward
from kernels.cuda.weighted_sum import weighted_sum_forward
from kernels.ops import DecodeStepOps

FP8_ARCH = 89  # the oldest architecture with FP8 matmuls


class CudaOps(Device):
    """Every operation of the model on one GPU.

    Args:
        numerics: the precision, and the kernels for matmuls and attention.
        index: of the GPU, as in Device.

    Raises:
        ValueError: as in Device, or the GPU is too old for FP8.
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
    qk_norm_forward, qk_norm_backward = qk_norm_forward, qk_norm_backward
    attention_forward, attention_backward = attention_forward, attention_backward
    decode_attention_forward = decode_attention_forward
    decode_step = decode_step
    gelu_forward, gelu_backward = gelu_forward, gelu_backward
    swiglu_forward, swiglu_backward = swiglu_forward, swiglu_backward
    cross_entropy_forward, cross_entropy_backward = cross_entropy_forward, cross_entropy_backward
    weighted_sum_forward = weighted_sum_forward
    square_sums, grad_norm = square_sums, grad_norm
    norm_chunk = CHUNK
    adamw, muon = adamw, muon
    sample, suppress_tokens = sample, suppress_tokens
    cast = cast
    fp8_weight, cast_weight, fp8_rescale = fp8_weight, cast_weight, fp8_rescale
    fp8_mlp_forward, fp8_mlp_backward = fp8_mlp_forward, fp8_mlp_backward

    def __init__(self, numerics: Numerics, index: int = 0) -> None:
        super().__init__(index)
        if numerics.precision == "fp8":
            if int(self.arch[3:]) < FP8_ARCH:
                raise ValueError(
                    f"numerics.precision: fp8 needs a GPU of sm_{FP8_ARCH} or later, {self.model} is "
                    f"{self.arch}; set it to bf16"
                )
            self.fp8 = self  # only the matmuls with an FP8 weight differ from bf16
        self.decode_step_ops: DecodeStepOps | None = self
        self.precision = "bf16" if self.fp8 else numerics.precision
        self.matmul, self.attention, self.deterministic = (
            numerics.matmul,
            numerics.attention,
            numerics.deterministic,
        )
        self.storage = BF16 if self.precision == "bf16" else FLOAT

    def set_current_scaling(self, current_scaling: bool) -> None:
        """See kernels.ops.Fp8Ops."""
        self.current_scaling = current_scaling

    def decode_step_rows(self, config: ModelConfig) -> int:
        """See kernels.ops.DecodeStepOps."""
        return decode_step_rows(self, self.storage, config)

    def workspace_bytes(self, config: ModelConfig, rows: int) -> int:
        """The scratch memory of the operation that needs most. Its module has a function scratch_bytes.

        Raises:
            ValueError: the kernels do not support the model.
        """
        modules = {sys.modules[op.__module__] for op in vars(CudaOps).values() if callable(op)}
        scratch = [module.scratch_bytes for module in modules if hasattr(module, "scratch_bytes")]
        return max(scratch_bytes(self, config, rows) for scratch_bytes in scratch)

    def rope_table(self, context: int, head_dim: int, base: float) -> Array:
        """The table of kernels/cpu/rope.py on the GPU, in fp32."""
        table = rope_table(context, head_dim, base).astype(np.float32)
        on_gpu = self.allocate(table.nbytes).view(np.float32).reshape(table.shape)
        self.upload(on_gpu, table)
        return on_gpu

    def describe(self, config: ModelConfig) -> str:
        """One line: GPU, precision, the kernels for such a model, and library versions."""
        kernels = f"matmul {self.matmul}, attention {attention_kernel(self, self.storage, config.head_dim)}"
        library = f", cuBLASLt {cublaslt.version()}" if self.matmul == "cublaslt" else ""
        precision = "fp8" if self.fp8 else self.precision
        return f"{self.model}, {precision}, {kernels}, CuPy {cupy.__version__}{library}"
