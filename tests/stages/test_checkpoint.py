"""Checkpoints: the same bytes, written atomically; foreign or damaged ones are refused."""

from pathlib import Path

import numpy as np
import pytest

from kernels.config import ModelConfig
from stages import checkpoint

CONFIG = ModelConfig(vocab_size=300, layers=1, heads=2, kv_heads=1, dim=8, ffn=12, context=16)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(3, 4)).astype(np.float32) for name in ("head", "embedding", "norm")}


def test_a_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    """Would catch a parameter that is lost, renamed, cast or transposed in the file."""
    checkpoint.save(tmp_path / "c", weights(), CONFIG, "abc")
    loaded = checkpoint.load(tmp_path / "c", "abc")
    assert loaded.config == CONFIG and loaded.tokenizer_sha256 == "abc"
    assert loaded.weights.keys() == weights().keys()
    for name, array in weights().items():
        assert np.array_equal(loaded.weights[name], array) and loaded.weights[name].dtype == np.float32


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """Would catch a time, a path or the order of a dict in what DVC hashes."""
    checkpoint.save(tmp_path / "a", weights(), CONFIG, "abc")
    checkpoint.save(tmp_path / "b", dict(reversed(weights().items())), CONFIG, "abc")
    for name in (checkpoint.WEIGHTS, checkpoint.MODEL):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [checkpoint.MODEL, checkpoint.WEIGHTS]
    modes = {path.stat().st_mode for path in (tmp_path / "a").iterdir()}
    assert len(modes) == 1  # the weights can be read by whoever can read the description


def test_a_foreign_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """Would catch a model that runs with half its weights, edited weights or another tokenizer's ids."""
    folder = tmp_path / "c"
    with pytest.raises(ValueError, match=r"c.model\.json: expected a file of a checkpoint.*make repro"):
        checkpoint.load(folder)
    checkpoint.save(folder, weights(), CONFIG, "abc")
    with pytest.raises(ValueError, match="trained with tokenizer abc, but the one given is xyz"):
        checkpoint.load(folder, "xyz")
    whole = (folder / checkpoint.WEIGHTS).read_bytes()
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    for damaged in (whole[:-10], flipped, b""):
        (folder / checkpoint.WEIGHTS).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"weights\.safetensors: incomplete or edited"):
            checkpoint.load(folder)
    checkpoint.save(folder, weights(), CONFIG, "abc")
    model = (folder / checkpoint.MODEL).read_text(encoding="utf-8")
    for spoilt in (
        model.replace('"heads": 2', '"heads": 4'),
        model.replace('"abc"', "5"),
        model[:-3],
        "[]",
        "7",
        "{}",
    ):
        assert spoilt != model
        (folder / checkpoint.MODEL).write_text(spoilt, encoding="utf-8")
        with pytest.raises(ValueError, match=r"model\.json: incomplete or edited \(.*\); run `make repro`"):
            checkpoint.load(folder)
