"""settings, overrides, schema and the params command: what is refused, with which line, and what composes."""

import os
import signal
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml

from kernels.config import ModelConfig
from kernels.generation import MIN_TEMPERATURE
from stages import params
from stages.overrides import compose, read_params
from stages.program import command_main, stage_main
from stages.settings import Model, Settings, load, validate

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULTS = compose(ROOT, [])


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the repository's root to the loader, and is the current one."""
    copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "dvc.yaml").touch()
    params.write(tmp_path, DEFAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values() -> dict[str, Any]:
    """The committed defaults as plain values, to be spoilt."""
    return deepcopy(DEFAULTS)


# A key that Model lacks could not be set, one that ModelConfig lacks would crash every stage.
def test_model_has_the_fields_of_the_engines_configuration() -> None:
    assert [field.name for field in fields(Model)] == [
        f.name for f in fields(ModelConfig) if f.name != "vocab_size"
    ]


# A key that is silently ignored (a typo) or replaced by a default would train something else than what was
# asked for.
@pytest.mark.parametrize("section", [field.name for field in fields(Settings)])
def test_missing_and_unknown_keys_are_named(section: str) -> None:
    without = values()
    del without[section]
    with pytest.raises(ValueError, match=f"the key '{section}' is missing"):
        validate(without)
    for key in values()[section] if section not in ("corpus", "conversations") else ["sources"]:
        without = values()
        del without[section][key]
        with pytest.raises(ValueError, match=f"^{section}: the key '{key}' is missing"):
            validate(without)
        misspelt = values()
        misspelt[section][f"{key}_"] = 1
        with pytest.raises(ValueError, match=f"^{section}: unknown key '{key}_'; did you mean {key}"):
            validate(misspelt)


# `dvc exp run --no-hydra -S model=gpt2_124m` writes this text over the section.
@pytest.mark.parametrize("wrong", ["gpt2_124m", None, 3, ["a"]])
def test_a_section_that_is_no_mapping(wrong: object) -> None:
    spoilt = values() | {"model": wrong}
    with pytest.raises(ValueError, match=r"^model: expected a mapping of keys, got .*--no-hydra"):
        validate(spoilt)


WRONG = [
    ("model.layers", True, "a whole number"),  # YAML's `yes`: 1 layer if bool passed for int
    ("model.layers", "4", "a whole number"),
    ("model.layers", 4.0, "a whole number"),
    ("model.layers", None, "a whole number"),
    ("model.layers", 0, "at least 1"),
    ("model.heads", 3, "a multiple of model.heads"),
    ("model.bias", 1, "true or false"),
    ("model.norm", "batchnorm", "one of rmsnorm, layernorm"),
    ("model.mtp_heads", 9, "a weight for each of model.mtp_heads = 9"),
    ("train_bpe.vocab_size", 261, "262"),  # 256 bytes and 6 special tokens
    ("train_bpe.vocab_size", 65537, "to 65536"),  # ids would wrap in uint16
    ("train_bpe.sample_bytes", 0, "at least 1"),
    ("train_bpe.special_tokens", "<|pad|>", "a list"),
    ("train_bpe.special_tokens", ["<|pad|>", "<|pad|>"], "distinct"),
    # What sft needs was asked for after all of pretraining.
    (
        "train_bpe.special_tokens",
        ["<|endoftext|>", "<|tool|>"],
        "also <|pad|>, <|system|>, <|user|>, <|assistant|>, <|end|>",
    ),
    ("train_bpe.pretrained", 3, "a path, or conf/none for none"),
    ("train_bpe.pretrained", None, "a path, or conf/none for none"),
    ("shard.pretokenized", "", "a path, or conf/none for none"),
    ("shard.tokens_per_shard", 999, "1000 to 2146435071"),
    ("pretrain.seed", -1, "at least 0"),
    ("pretrain.steps", 0, "at least 1"),
    (
        "pretrain.lr",
        float("nan"),
        "a finite number",
    ),  # comparisons with NaN are false: it would pass a range check
    ("pretrain.lr", float("inf"), "a finite number"),
    ("pretrain.lr", True, "a finite number"),
    ("pretrain.lr", "3e-4", "a finite number"),
    ("pretrain.lr", 0, "above 0"),
    ("pretrain.lr", -1e-3, "above 0"),
    ("pretrain.min_lr", 1.0, "0 to pretrain.lr"),
    ("pretrain.warmup_steps", 10**9, "0 to pretrain.steps"),
    ("pretrain.cooldown_steps", 1, "only wsd"),
    ("pretrain.schedule", "linear", "one of cosine, wsd"),
    ("pretrain.beta1", 1.0, "below 1"),
    ("pretrain.beta2", -0.1, "at least 0"),
    ("pretrain.eps", 0, "above 0"),
    ("pretrain.grad_clip", -1, "at least 0"),
    ("pretrain.weight_decay", -0.1, "at least 0"),
    ("pretrain.mtp_loss_weights", [1.0], "a weight for each of model.mtp_heads = 4"),
    ("pretrain.mtp_loss_weights", [0.0, 1.0, 1.0, 1.0], "a first weight"),
    ("pretrain.mtp_loss_weights", [1.0, -1.0, 0.0, 0.0], "at least 0"),
    ("pretrain.mtp_loss_weights", [1.0, "x", 0.0, 0.0], "a finite number"),
    ("pretrain.val_every", 0, "at least 1"),  # a step modulo 0
    ("sft.overflow", "keep", "one of drop, truncate"),
    ("sft.lr", 0, "above 0"),
    ("eval.top_p", 0, "above 0 and at most 1"),
    ("eval.top_k", -1, "at least 0"),
    ("eval.temperature", -1, "at least 1e-6"),
    ("eval.temperature", MIN_TEMPERATURE / 2, "at least 1e-6"),
    ("eval.max_tokens", 0, "at least 1"),
    ("eval.prompts", ["a", 3], "a text"),
    ("numerics.precision", "int8", "one of fp32"),
    ("runtime.device", "gpu", "one of auto, cpu"),
    ("runtime.threads", -1, "at least 0"),
    ("corpus.sources", "wheel", "a list"),
]


# Without validation each would be a traceback from inside a stage, or go unnoticed.
@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_wrong_values_are_named(key: str, value: object, expected: str) -> None:
    section, name = key.split(".")
    spoilt = values()
    spoilt[section][name] = value
    with pytest.raises(ValueError, match=expected) as error:
        validate(spoilt)
    assert section in str(error.value)
    assert "\n" not in str(error.value)


# YAML writes 1 for 1.0, which is not an error.
def test_whole_numbers_are_good_for_floats() -> None:
    spoilt = values()
    spoilt["pretrain"]["grad_clip"] = 1
    assert isinstance(validate(spoilt).pretrain.grad_clip, float)


# gpt2_124m has one head, the default weights are for four: choosing the model must be enough.
def test_weights_of_absent_heads_are_cut_off() -> None:
    assert load(["model=gpt2_124m"]).pretrain.mtp_loss_weights == (1.0,)
    assert load(["model.mtp_heads=2"]).sft.mtp_loss_weights == (1.0, 0.1)


# Ids of one vocabulary decoded with another of the same size: GPT-2's shards with a tokenizer trained here.
def test_ready_shards_need_their_tokenizer() -> None:
    with pytest.raises(
        ValueError,
        match=r"train_bpe\.pretrained: expected the tokenizer of shard\.pretokenized, got 'conf/none'",
    ):
        load(["shard.pretokenized=fineweb"])
    settings = load(["shard.pretokenized=fineweb", "train_bpe.pretrained=gpt2"])
    assert (settings.shard.pretokenized, settings.train_bpe.pretrained) == (Path("fineweb"), Path("gpt2"))


# A value override that recomposed conf/ would drop what `dvc exp run -S` wrote into params.yaml.
def test_value_overrides_edit_params_yaml(root: Path) -> None:
    params.write(root, compose(ROOT, ["pretrain.steps=77"]))
    settings = load(["model.layers=7", "pretrain.lr=3e-4", "train_bpe.pretrained=conf/none"])
    assert (settings.pretrain.steps, settings.model.layers, settings.pretrain.lr) == (77, 7, 3e-4)


# `model=NAME` on plain params.yaml would put the text over the section, as DVC's --no-hydra does.
def test_group_overrides_compose_again_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(["model.layers=5", "model=gpt2_124m"])
    assert (settings.model.layers, settings.model.norm) == (5, "layernorm")
    said = capsys.readouterr().err
    assert "model.layers=5" in said
    assert "model.norm=layernorm" in said
    assert "pretrain.lr" not in said
    assert load(["+experiment=smoke"]).pretrain.steps < 100


REFUSED = [
    ("pretrain.step=3", "unknown key pretrain.step; did you mean pretrain.steps"),
    ("pretrain.lr.x=3", "unknown key pretrain.lr.x"),
    ("model=gpt2_125m", "model: no file conf/model/gpt2_125m.yaml; did you mean gpt2_124m"),
    ("model=nanoeuler", "no file conf/model/nanoeuler.yaml; it is now called model=nanoeuler_269m"),
    ("+experiment=nanoeuler", r"nanoeuler.yaml; it is now called \+experiment=nanoeuler_269m"),
    ("+experiment=smok", "experiment: no file conf/experiment/smok.yaml; did you mean smoke"),
    ("experiment=smoke", r"use \+experiment=smoke"),
    ("model={layers: 3}", "model: no file conf/model"),
    ("pretrain.steps=1,2", "one run takes one value"),
    ("pretrain.steps", "expected key=value"),
    ("+model.x=1", "model: unknown key 'x'"),
    ("+nothing.x=1", "params.yaml: unknown key 'nothing'"),
    ("~model.layers", "model: the key 'layers' is missing"),
    ("~model", "the key 'model' is missing"),
    ("pretrain.lr=???", "pretrain.lr"),
    ("pretrain.lr=${nowhere}", "nowhere"),
]


# Hydra's own messages for these span several lines, or the override is taken and means something else.
@pytest.mark.parametrize(("override", "expected"), REFUSED)
def test_wrong_overrides_are_named(override: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        load([override])
    assert "\n" not in str(error.value)


# Hydra's message for an unknown key asks for a plus, which then fails.
def test_unknown_key_of_conf_is_named() -> None:
    for override in ("pretrain.step=3", "model.layer=3"):
        with pytest.raises(
            ValueError, match=rf"^unknown key {override[:-2]}; did you mean {override[:-2]}s\?$"
        ):
            compose(ROOT, ["model=gpt2_124m", override])


# In another folder DVC writes a second params.yaml and stages would read the wrong one.
def test_other_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    with pytest.raises(ValueError, match="run from the repository's root"):
        load([])


# A half-written or hand-edited params.yaml is the user's to repair: a line, not a parser's traceback.
@pytest.mark.parametrize(
    "text", ["model: [", "- a\n", "", "model: 1\nmodel: 2\n", "a: ${b}\n", "a: '???'\n", "\x00"]
)
def test_broken_params_yaml(root: Path, text: str) -> None:
    (root / "params.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"params\.yaml"):
        load([])


# A stage that exits 0 after an error or Ctrl-C is recorded by DVC as done.
@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (ValueError("two\nlines"), 1, "error: two lines\n"),
        (FileNotFoundError(2, "No such file", "data/x"), 1, "error: [Errno 2] No such file: 'data/x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_main_turns_errors_into_a_line_and_a_code(
    raised: BaseException,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(argv: list[str]) -> None:
        raise raised

    monkeypatch.setattr(sys, "argv", ["stage"])
    with pytest.raises(SystemExit) as stopped:
        command_main(run)
    assert stopped.value.code == code
    assert capsys.readouterr().err == line


# A programming error must not be dressed up as the user's.
def test_main_lets_bugs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stage"])
    with pytest.raises(ZeroDivisionError):
        command_main(lambda argv: print(1 // 0))


# The command line has to reach the stage.
def test_stage_main_hands_over_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(sys, "argv", ["stage", "model.layers=9"])
    stage_main("shard", seen.append)
    assert seen[0].model.layers == 9
    monkeypatch.setattr(sys, "argv", ["stage", "--help"])
    stage_main("shard", seen.append)
    assert len(seen) == 1
    assert "key=value" in capsys.readouterr().out


# Two stages at once would write the same files, or one would read files that the other replaces. A waiting
# stage must not run after a later one and replace its outputs. The process that holds the lock is killed, as
# its `dvc` may have been before: a lock that outlives it would be waited for without end.
def test_a_second_stage_in_the_checkout_waits(root: Path) -> None:
    held = "import time; from stages.program import stage_lock\n"
    held += "with stage_lock('shard'): print('held', flush=True); time.sleep(60)"
    waits = "import sys; from stages.program import stage_main; stage_main('pretrain', lambda settings: print('ran'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(code: str, *argv: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", code, *argv]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
        return subprocess.Popen(command, cwd=root, env=environment, **pipes)

    with start(held) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        assert start(waits, "runtime.plan=true").communicate(timeout=60)[0] == "ran\n"
        with start(waits) as second:
            assert second.stdout
            line = second.stdout.readline()
            assert (
                line
                == f"pretrain: waiting for shard (process {first.pid}), which runs in this checkout; Ctrl-C "
                "gives up\n"
            )
            with start(waits) as third:
                assert third.stdout and third.stdout.readline() == line
                assert second.poll() is None
                first.kill()
                assert third.communicate(timeout=60)[0] == "ran\n" and third.returncode == 0
            said = f"error: pretrain: pretrain (process {third.pid}) was started while this one waited; start this one again"
            assert said in second.communicate(timeout=60)[1] and second.returncode == 1


# --check is lint's guard against an edit in conf/ that dvc repro would not see; --write its repair.
def test_params_check_and_write(root: Path) -> None:
    params.run(["--check"])
    with pytest.raises(ValueError, match=r"pretrain\.steps \(is [0-9]+, conf/ has 333\)"):
        params.run(["--check", "pretrain.steps=333"])
    params.run(["--write", "pretrain.steps=3", "pretrain.warmup_steps=1"])
    assert yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))["pretrain"]["steps"] == 3
    params.run(["--write"])
    params.run(["--check"])
    (root / "params.yaml").write_text(
        "# a note\n" + (root / "params.yaml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="edited by hand"):
        params.run(["--check"])


KEPT = [
    ["+experiment=own_text", "pretrain.steps=3000", "train_bpe.vocab_size=400"],
    ["model=euler_10m", "train_bpe=bpe_1024", "model.layers=2", "model.tied_head=true"],
    ["+experiment=smoke", "corpus=tinystories", "pretrain.mtp_loss_weights=[1.0,0.2,0.1,0.1]", "sft.lr=1e-4"],
    ["eval.prompts=['a: b','# c','yes']", "train_bpe.pretrained='null: #x'", "conversations.name='null'"],
    ["corpus.sources=[{kind: local, files: ['books/*.txt'], license: mine}]", "corpus.local_path=books"],
]


# `dvc exp run` composes conf/ again: overrides that `--write` had put only into params.yaml were lost
# silently.
@pytest.mark.parametrize("overrides", KEPT, ids=" ".join)
def test_kept_overrides_stay_in_every_later_composition(root: Path, overrides: list[str]) -> None:
    expected = compose(root, overrides)
    params.run(["--write", *overrides])
    assert compose(root, []) == expected
    assert read_params(root / "params.yaml") == expected
    further = compose(root, ["sft.steps=50", "eval.seed=4"])
    assert (further["sft"].pop("steps"), further["eval"].pop("seed")) == (50, 4)
    assert expected["sft"].pop("steps") != 50 and expected["eval"].pop("seed") != 4
    assert further == expected
    params.run(["--write"])
    assert compose(root, []) == DEFAULTS


# What is kept must not win over what is asked for now; and the next --write must not pile up on the last one.
def test_kept_overrides_give_way(root: Path) -> None:
    params.run(["--write", "model=euler_10m", "pretrain.steps=3000", "+experiment=own_text"])
    assert compose(root, ["model=euler_1m"])["model"] == DEFAULTS["model"]
    assert compose(root, ["pretrain.steps=7"])["pretrain"]["steps"] == 7
    assert compose(root, ["+experiment=smoke"])["pretrain"]["steps"] == 20
    assert compose(root, ["+experiment=own_text"])["corpus"]["name"] == "local"
    assert compose(root, ["kept=none"]) == DEFAULTS
    params.run(["--write", "sft.steps=50"])
    assert compose(root, []) == compose(root, ["kept=none", "sft.steps=50"])


# --compose after an edit in conf/ must not lose the kept overrides.
def test_compose_keeps_what_is_kept(root: Path) -> None:
    params.run(["--write", "pretrain.steps=3000"])
    (root / "params.yaml").write_text("model: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"`python -m stages\.params --compose` regenerates it"):
        params.run(["--check"])
    params.run(["--compose"])
    assert read_params(root / "params.yaml")["pretrain"]["steps"] == 3000
    params.run(["--check"])


# A library that turns Ctrl-C into its own error led to "error: params.yaml: ...", with advice to regenerate
# it.
@pytest.mark.parametrize("error", [ValueError("params.yaml: broken"), KeyError("sources")])
def test_an_interrupt_that_a_library_turns_into_an_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "argv", ["x"])
        with pytest.raises(SystemExit) as stopped:
            command_main(run)
        assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# Ctrl-C while a program still imports its modules printed a traceback.
def test_an_interrupt_while_modules_are_imported(tmp_path: Path) -> None:
    (tmp_path / "stages").symlink_to(ROOT / "stages")
    (tmp_path / "hydra").mkdir()  # imported early, in place of the library
    (tmp_path / "hydra" / "__init__.py").write_text(
        "import signal, time; signal.raise_signal(signal.SIGINT); time.sleep(9)\n"
    )
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); import runpy; sys.argv = ['-m']\n"
    code += "runpy.run_module('stages.download', run_name='__main__', alter_sys=True)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# A deletion has no form in a config file: kept half, it would compose something that nobody asked for.
def test_what_cannot_be_kept_is_refused(root: Path) -> None:
    before = [(root / name).read_bytes() for name in ("params.yaml", params.KEPT)]
    with pytest.raises(ValueError, match="a deletion cannot be kept"):
        params.run(["--write", "~corpus.local_path"])
    assert before == [(root / name).read_bytes() for name in ("params.yaml", params.KEPT)]


# A broken conf/ must not replace a good params.yaml.
def test_params_write_validates_first(root: Path) -> None:
    before = (root / "params.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"model\.layers"):
        params.run(["--write", "model.layers=0"])
    assert (root / "params.yaml").read_bytes() == before
    assert sorted(path.name for path in root.iterdir()) == ["conf", "dvc.yaml", "params.yaml"]
