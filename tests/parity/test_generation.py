"""Greedy generation, token for token: transformers' and ours, with and without a cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kernels.config import ModelConfig
from kernels.generation import Sampling, generate
from stages.chat_template import render, render_prompt
from tests.parity.cases import (
    EULER,
    MODELS,
    Weights,
    engine_with,
    exported,
    our_logits,
    text,
    tokenizer,
    train,
    trained,
)

NEW, CONTEXT = 56, 80
UPDATES = 60
PROMPTS = ("# Author", "def ", "This module is")


def model_of(name: str) -> tuple[ModelConfig, Weights]:
    """One of the models with room for a text, which has learnt a piece by heart: it writes more than one word
    over and over.
    """
    config = replace(MODELS[name], context=CONTEXT)
    engine = engine_with(config, rows=4)
    for _ in range(UPDATES):
        train(engine, tokenizer().encode(text()[:3000]), 1, 3e-3)
    return config, engine.weights()


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_greedy_token_for_token(name: str, tmp_path: Path) -> None:
    """Would catch a cache off by one position, a rotation from the wrong position, and ids that end a text
    too early.
    """
    config, weights = model_of(name)
    model, engine = exported(config, weights, tmp_path), engine_with(config, weights)
    written = set()
    for prompt in PROMPTS:
        ids = tokenizer().encode(prompt).tolist()
        found = []
        for use_cache in (True, False):
            inp = torch.tensor([ids])
            kind = {"do_sample": False, "max_new_tokens": NEW, "use_cache": use_cache}
            found.append(
                model.generate(inp, attention_mask=torch.ones_like(inp), **kind)[0, len(ids) :].tolist()
            )
        stop = set(model.generation_config.eos_token_id)
        cached = list(generate(engine, ids, Sampling(temperature=0), max_tokens=NEW, stop=stop))
        uncached: list[int] = []
        while len(uncached) < NEW:
            token = int(np.argmax(our_logits(engine, np.array([ids + uncached], np.int32))[0, -1]))
            if token in stop:
                break
            uncached.append(token)
        for theirs in found:
            assert [token for token in theirs if token not in stop] == cached
        assert cached == uncached and len(cached) > 10
        written |= set(cached)
    assert len(written) > 20  # a model that writes one token for ever proves little


# Without <|endoftext|> in front a base model writes another text, at a higher loss: all that it was trained
# on had one.
@pytest.mark.parametrize("name", MODELS)
def test_pipeline_of_a_base_model_writes_our_text(name: str, tmp_path: Path) -> None:
    config, weights = model_of(name)
    exported(config, weights, tmp_path, "base")
    engine, separator = engine_with(config, weights), tokenizer().special["<|endoftext|>"]
    writer = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu", dtype=torch.float32)
    assert writer.tokenizer is not None
    for prompt in PROMPTS:
        ids = [separator, *tokenizer().encode(prompt).tolist()]
        assert writer.tokenizer(prompt)["input_ids"] == ids
        stop = list(tokenizer().special.values())
        ours = list(generate(engine, ids, Sampling(temperature=0), max_tokens=NEW, stop=stop))
        theirs = writer(prompt, do_sample=False, max_new_tokens=NEW, return_full_text=False)[0][
            "generated_text"
        ]
        assert theirs == tokenizer().decode(ours) and len(ours) > 10


# A conversation begins with the template's own tokens; one more in front, or two, is what the chat model
# never saw.
@pytest.mark.parametrize("kind", ["chat", "base"])
def test_chat_template_gives_our_ids(kind: str, tmp_path: Path) -> None:
    exported(EULER, trained(EULER), tmp_path, kind)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": role, "content": f"some {role}"} for role in ("system", "user", "assistant", "user")]
    found = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found == render_prompt(talk, tokenizer()).tolist()
    whole = theirs.apply_chat_template(talk[:3], return_dict=True)["input_ids"]
    assert whole == render(talk[:3], tokenizer())[0].tolist()
    if kind == "chat":
        assert theirs("some text")["input_ids"] == tokenizer().encode("some text").tolist()
