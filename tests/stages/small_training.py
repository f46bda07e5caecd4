"""A small model, its training settings and random micro-batches, for the tests of the training loop."""

import numpy as np

from kernels.batch import Batch
from kernels.config import ModelConfig, Numerics
from kernels.engine import Engine
from stages.training_settings import Training

CONFIG = ModelConfig(vocab_size=40, layers=2, heads=2, kv_heads=1, dim=16, ffn=24, context=12, mtp_heads=2)
SETTINGS = Training(
    seed=1, steps=10, micro_batch=3, grad_accum_steps=2, optimizer="adamw", schedule="cosine", lr=1e-2,
    min_lr=0.0, warmup_steps=2, cooldown_steps=0, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, embedding_lr_scale=1.0,
    head_lr_scale=1.0, vector_lr_scale=1.0,
    grad_clip=1.0, mtp_loss_weights=(1.0, 0.1),
    val_every=4, sample_every=5, checkpoint_every=3,
)  # fmt: skip


def engine(rows: int = 3) -> Engine:
    return Engine(CONFIG, Numerics(), micro_batch=rows, device="cpu", threads=1, seed=7)


def random_batch(index: int, rows: int = 3, supervised: float = 0.5) -> Batch:
    """Micro-batch `index`: random ids, two documents a row, and some of the targets, in each batch another
    share of them.
    """
    rng = np.random.default_rng([11, index])
    ids = rng.integers(0, CONFIG.vocab_size, (rows, CONFIG.context + 1), dtype=np.int32)
    document = np.repeat(np.arange(2, dtype=np.int32), CONFIG.context // 2)[None].repeat(rows, axis=0)
    weight = (rng.random((rows, CONFIG.context)) < supervised * rng.random() + 0.1).astype(np.float32)
    return Batch(np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), document, weight)
