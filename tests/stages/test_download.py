"""The stage as a whole, on small local sources, and every corpus and set of conversations that is shipped."""

import gzip
import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from stages import download
from stages.documents import read_documents
from stages.schema import build
from stages.sources.corpus import Conversations, Corpus, HoldoutRule, Source, hash_fraction
from stages.text_files import read_rows

CONF = Path(__file__).resolve().parents[2] / "conf"
PLAY = "# {0}\n\n**A**\nWho's there, {0}?\n\n**B**\nNay, answer me.\n\n**A**\nLong live the king of {0}!\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with three plays and twenty pairs."""
    monkeypatch.chdir(tmp_path)
    for name in ("ado", "hamlet", "macbeth"):
        (tmp_path / f"{name}.md").write_text(PLAY.format(name), encoding="utf-8", newline="\n")
    pairs = [json.dumps({"prompt": f"question {n}", "completion": f"answer {n}"}) for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs + pairs[:3]), encoding="utf-8", newline="\n")
    return tmp_path


def small(**keys: Any) -> Any:
    plays = Source("local", files=("*.md",), format="play", license="MIT", max_exchanges=2)
    macbeth = HoldoutRule(documents=("macbeth.*",))
    corpus = Corpus("small", (plays,), macbeth)
    pairs = Source("local", files=("pairs.jsonl",))
    conversations = Conversations(
        "small", (replace(plays, validation=macbeth), pairs), HoldoutRule(fraction=0.3), 60
    )
    return SimpleNamespace(**({"corpus": corpus, "conversations": conversations} | keys))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_outputs_and_manifest(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a document in the wrong split, counts and checksums that aren't the files', lost or repeated
    conversations.
    """
    folder = here / download.FOLDER
    download.run(small())
    assert [text.splitlines()[0] for text in read_documents(here / download.DOCUMENTS["train"])] == [
        "ado",
        "hamlet",
    ]
    val = list(read_documents(here / download.DOCUMENTS["val"]))
    assert val == [
        "macbeth\n\nA:\nWho's there, macbeth?\n\nB:\nNay, answer me.\n\nA:\nLong live the king of macbeth!\n"
    ]

    manifest = json.loads((here / download.MANIFEST).read_text(encoding="utf-8"))
    assert set(contents(folder)) == {"train.jsonl.zst", "val.jsonl.zst", "conversations.train.jsonl.zst",
                                     "conversations.val.jsonl.zst", "manifest.json"}  # fmt: skip
    for section, paths in (("corpus", download.DOCUMENTS), ("conversations", download.CONVERSATIONS)):
        for split, path in paths.items():
            facts = manifest[section][split]
            assert facts["sha256"] == hashlib.sha256((here / path).read_bytes()).hexdigest()
            found = [row for _, row in read_rows(here / path)]
            assert facts["count"] == len(found)
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found)
            assert facts["text_sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert manifest["corpus"]["val"]["bytes"] == len(val[0].encode())
    assert manifest["corpus"]["sources"][0]["license"] == "MIT"

    rows = {
        split: [row["messages"] for _, row in read_rows(here / path)]
        for split, path in download.CONVERSATIONS.items()
    }
    everything = [json.dumps(messages) for split in rows for messages in rows[split]]
    assert len(everything) == len(set(everything)) == 2 * 3 + 20
    nothing = {"empty": 0, "tool_messages": 0, "bad_rows": 0}
    assert manifest["conversations"]["left_out"] == {"too_long": 0, "repeated": 3, **nothing}
    assert {len(messages) for messages in rows["val"]} == {2}
    assert sum("macbeth" in json.dumps(messages) for messages in rows["train"]) == 0
    assert sum("macbeth" in json.dumps(messages) for messages in rows["val"]) == 2
    assert "corpus small: train 2 documents" in capsys.readouterr().out


def test_two_runs_give_the_same_bytes(here: Path) -> None:
    """Catches times, paths and orders in the outputs."""
    download.run(small(), folder=here / "one")
    download.run(small(), folder=here / "two")
    assert contents(here / "one") == contents(here / "two")


def test_a_failed_run_leaves_no_manifest(here: Path) -> None:
    """Catches outputs of two runs that are taken for one complete download, and temporary files that stay."""
    download.run(small())
    (here / "ado.md").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"ado\.md: not UTF-8 at byte 0"):
        download.run(small())
    assert not (here / download.MANIFEST).exists()
    assert not list(here.rglob("*.partial"))


def test_too_long_conversations_are_counted(here: Path) -> None:
    """Catches a limit on single messages, one that is off by one, and conversations that vanish without a
    count.
    """
    pairs = Source("local", files=("pairs.jsonl",))
    section = Conversations("small", (pairs,), HoldoutRule(fraction=0.5), max_chars=len("question 1answer 1"))
    facts = download.write_conversations(section, here / "out")
    assert facts["left_out"] == {"too_long": 10, "repeated": 3, "empty": 0, "tool_messages": 0, "bad_rows": 0}
    assert facts["train"]["count"] + facts["val"]["count"] == 10


def test_bad_rows_and_empty_answers_are_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches one bad row that ends the run, and rows that are missing from the manifest and from what is
    printed.
    """
    rows: list[dict[str, Any]] = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(20)]
    rows += [{"prompt": "q", "completion": " "}, {"other": 1}, {}]
    (here / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8", newline="\n")
    section = Conversations("small", (Source("local", files=("pairs.jsonl",)),), HoldoutRule(fraction=0.3))
    facts = download.write_conversations(section, here / "out")
    assert facts["left_out"] == {"too_long": 0, "repeated": 0, "empty": 1, "tool_messages": 0, "bad_rows": 2}
    assert facts["train"]["count"] + facts["val"]["count"] == 20
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said[:2]] == ["left out: pairs.jsonl"] * 2
    assert said[2] == "conversations: 2 bad rows left out; conversations.on_bad_row=error stops at the first"
    with pytest.raises(ValueError, match=r"^pairs\.jsonl, line 22: expected messages, "):
        download.write_conversations(replace(section, on_bad_row="error"), here / "out")


def test_damaged_lines_are_bad_rows(here: Path) -> None:
    """Catches a cut last line, or one item that is no object, that ends a run of thousands of
    conversations.
    """
    rows = [json.dumps({"prompt": f"q{n}", "completion": f"a{n}"}) for n in range(20)]
    (here / "pairs.jsonl").write_text(
        "\n".join([*rows, "{broken", '{"prompt": "q'.ljust(20)]), encoding="utf-8", newline="\n"
    )
    for name in ("items.json", "items.jsonl"):
        items = [{"instruction": f"do {n}", "output": f"done {n} {name}"} for n in range(20)]
        (here / name).write_text(json.dumps([*items, "text", 3]), encoding="utf-8", newline="\n")
    lines = [json.dumps({"prompt": f"p{n}", "completion": f"b{n}"}) for n in range(20)]
    (here / "items_Lines.json").write_text("\n".join([*lines, "{broken"]), encoding="utf-8", newline="\n")
    one = json.dumps({"prompt": "one", "completion": "object"}, indent=1)
    (here / "items_One.json.gz").write_bytes(gzip.compress(one.encode()))
    section = Conversations(
        "small", (Source("local", files=("pairs.jsonl", "items*")),), HoldoutRule(fraction=0.3)
    )
    facts = download.write_conversations(section, here / "out")
    assert facts["train"]["count"] + facts["val"]["count"] == 81 and facts["left_out"]["bad_rows"] == 7
    with pytest.raises(ValueError, match=r"^items\.json, item 21: expected a JSON array of objects, got str"):
        download.write_conversations(replace(section, on_bad_row="error"), here / "out")


def test_nothing_but_bad_rows(here: Path) -> None:
    """Catches an error that says all texts are empty where a key is mistyped."""
    (here / "pairs.jsonl").write_text(
        '{"question": "q", "answer": "a"}\n' * 9, encoding="utf-8", newline="\n"
    )
    section = Conversations("small", (Source("local", files=("pairs.jsonl",)),), HoldoutRule(fraction=0.3))
    with pytest.raises(
        ValueError, match=r"nothing to read in .*; 9 bad rows, the first: pairs\.jsonl, line 1: .* answer"
    ):
        download.write_conversations(section, here / "out")


def test_one_held_out_conversation_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a figure of eval's that is missing after all training, without a word before."""
    rows = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(40)]
    (here / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8", newline="\n")
    source, alone = Source("local", files=("pairs.jsonl",)), 0
    for fraction in (0.01, 0.02, 0.03, 0.05, 0.3):
        with suppress(ValueError):  # no conversation is held out
            facts = download.write_conversations(
                Conversations("small", (source,), HoldoutRule(fraction=fraction)), here / "out"
            )
            told = "so eval has no answer_loss_shuffled" in capsys.readouterr().out
            assert told == (facts["val"]["count"] == 1)
            alone += told
    assert alone


# A fraction of a few documents that holds out none by its hash ended the stage: twenty chats of one's own,
# say.
def test_a_fraction_of_few_holds_out_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(20)]
    (here / "pairs.jsonl").write_text(
        "\n".join(map(json.dumps, [{"bad": 1}, *rows])), encoding="utf-8", newline="\n"
    )
    pairs = Source("local", files=("pairs.jsonl",))
    few = download.write_conversations(
        Conversations("small", (pairs,), HoldoutRule(fraction=1e-9)), here / "out"
    )
    assert (few["train"]["count"], few["val"]["count"], few["left_out"]["bad_rows"]) == (19, 1, 1)
    said = capsys.readouterr()
    assert "validation.fraction = 1e-09 of so few holds out none, so one is held out" in said.out
    assert said.err.count("left out: pairs.jsonl, line 1") == 1
    ((_, held_out),) = read_rows(here / "out" / "conversations.val.jsonl.zst")
    assert hash_fraction(held_out["messages"][0]["content"]) == min(
        hash_fraction(row["prompt"]) for row in rows
    )
    corpus = replace(small().corpus, validation=HoldoutRule(fraction=1e-9))
    assert download.write_corpus(corpus, here / "out")["val"]["count"] == 1
    alone = replace(corpus, sources=(Source("local", files=("ado.md",)),))
    with pytest.raises(ValueError, match="small: the split val is empty"):
        download.write_corpus(alone, here / "out")
    own = replace(corpus.sources[0], validation=HoldoutRule(documents=("nobody*", "ado*")))
    with pytest.raises(ValueError, match=r"no document is named like nobody\*"):
        download.write_corpus(replace(corpus, sources=(own,)), here / "out")


# 20,000 files of one line gave a held-out set of 4-character documents, whose bits a byte mean nothing.
@pytest.mark.parametrize(
    ("count", "length", "refused"), [(120, 60, True), (120, 2000, False), (30, 60, False)]
)
def test_short_tails_of_many_documents_are_refused(
    here: Path, count: int, length: int, refused: bool
) -> None:
    (here / "many").mkdir()
    for number in range(count):
        (here / "many" / f"{number}.txt").write_text(
            f"{number} " + "x" * length, encoding="utf-8", newline="\n"
        )
    corpus = Corpus("many", (Source("local", files=("many/*",)),), HoldoutRule(tail=0.1))
    if refused:
        with pytest.raises(ValueError, match=r"^corpus\.validation\.tail: the held-out ends of 120 documents have [67] bytes "
                                             r".*set corpus\.validation\.tail=0 corpus\.validation\.fraction=0\.1$"):  # fmt: skip
            download.write_corpus(corpus, here / "out")
        corpus = replace(corpus, validation=HoldoutRule(fraction=0.1))
    assert download.write_corpus(corpus, here / "out")["val"]["count"] > 0


def test_empty_splits_and_globs_without_effect(here: Path) -> None:
    """Catches a training run on nothing, found out three stages later."""
    corpus = small().corpus
    (here / "empty.txt").write_text(" \n", encoding="utf-8", newline="\n")
    for changed, message in (
        (
            replace(corpus, validation=HoldoutRule(documents=("*",))),
            r"small: the split train is empty.*corpus\.validation",
        ),
        (
            replace(corpus, validation=HoldoutRule(documents=("mac*", "lear*"))),
            r"no document is named like lear\*",
        ),
        (
            Corpus("e", (Source("local", files=("empty.txt",)),), HoldoutRule(tail=0.1)),
            r"e: nothing to read in empty\.txt",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            download.write_corpus(changed, here / "out")


def shipped(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def load(group: str, name: str) -> Any:
    values = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    return build({"corpus": Corpus, "conversations": Conversations}[group], values, group)


def hub_folder(folder: Path, rows: list[dict[str, Any]], split: str) -> str:
    (folder / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet"
    )
    return str(folder)


@pytest.mark.parametrize("name", [name for name in shipped("corpus") if name != "shakespeare"])
def test_shipped_corpora_on_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Catches a shipped file with a wrong key or shape: the hub's datasets stand as folders, the rest as
    local files.
    """
    corpus = load("corpus", name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "mine.txt").write_text("line\n" * 100, encoding="utf-8", newline="\n")
    sources = []
    for number, source in enumerate(corpus.sources):
        if source.kind == "hf":
            rows = [{source.text_key: f"document {number} {n} " + "x" * 400, "id": n} for n in range(3000)]
            folder = hub_folder(tmp_path / f"set{number}", rows, source.split)
            source = replace(source, dataset=folder, subset=None, max_bytes=source.max_bytes and 600_000)
        sources.append(source)
    facts = download.write_corpus(replace(corpus, sources=tuple(sources)), tmp_path / "out")
    assert [facts[split]["count"] > 0 for split in ("train", "val")] == [name != "none"] * 2
    if name == "books_web":
        books, web = (source["bytes"] for source in facts["sources"])
        assert abs(books / (books + web) - 0.3) < 0.002  # to a document's length, 0.1 % of the whole


@pytest.mark.parametrize("name", [name for name in shipped("conversations") if name != "shakespeare"])
def test_shipped_conversations_on_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches a shipped file with a wrong key, split or shape."""
    section = load("conversations", name)
    monkeypatch.chdir(tmp_path)
    messages = [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}] for n in range(1500)
    ]
    shapes: dict[str, list[dict[str, Any]]] = {
        "messages": [{"messages": turns, "prompt": turns[0]["content"]} for turns in messages],
        "alpaca": [{"instruction": f"q{n}", "input": "", "output": "a", "text": "all"} for n in range(1500)],
    }
    source = section.sources[0]
    if source.kind == "hf":
        source = replace(
            source, dataset=hub_folder(tmp_path / "set", shapes[source.format], source.split), subset=None
        )
    else:
        (tmp_path / "conversations").mkdir()
        lines = "\n".join(json.dumps(row) for row in shapes["messages"])
        (tmp_path / "conversations" / "mine.jsonl").write_text(lines, encoding="utf-8", newline="\n")
    facts = download.write_conversations(replace(section, sources=(source,)), tmp_path / "out")
    assert facts["train"]["count"] > 1000 and facts["val"]["count"] > 0


def test_default_holds_out_the_same_plays_in_both_sections() -> None:
    """Catches an answer of the held-out conversations that was read in pretraining."""
    corpus, conversations = load("corpus", "shakespeare"), load("conversations", "shakespeare")
    assert corpus.sources[0].sha256 == conversations.sources[0].sha256
    assert conversations.sources[0].validation == corpus.validation
