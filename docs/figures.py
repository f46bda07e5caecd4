"""Draws the README's figures: docs/loss.svg from the curves of the last run, docs/pipeline.svg.

    .venv/bin/python -m docs.figures        (make figures)

Plain SVG as text, the same bytes for the same curves. Both carry a background and colours for light and dark
mode.
"""

import csv
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from stages.program import command_main
from stages.text_files import write_text

DOCS, CURVES = Path("docs"), Path("data/pretrain/curves")
REACH = 10  # rows of train.csv on each side, in the running mean

# The classes of every drawing: `l` a line, `t` a text, `b` a box; `1` and `2` the two hues.
STYLE = """
text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.page { fill: #ffffff; stroke: #d1d9e0 } .title { font-size: 14px; font-weight: 600 } .soft { fill: #59636e }
.small { font-size: 11px } .end { text-anchor: end } .mid { text-anchor: middle }
.grid { stroke: #d1d9e0 } .l { stroke: #59636e; fill: none } .dot { stroke-dasharray: 2 3 } .head { fill: #59636e }
.l1 { stroke: #0969da; fill: none } .l2 { stroke: #bc4c00; fill: none } .thick { stroke-width: 2 } .faint { opacity: .35 }
.t1 { fill: #0969da } .t2 { fill: #bc4c00 } .b { fill: #f6f8fa; stroke: #818b98 }
.b1 { fill: #ddf4ff; stroke: #0969da } .b2 { fill: #fff1e5; stroke: #bc4c00 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .page { fill: #0d1117; stroke: #3d444d } .soft { fill: #9198a1 }
.grid { stroke: #3d444d } .l { stroke: #9198a1 } .head { fill: #9198a1 }
.l1 { stroke: #4493f8 } .l2 { stroke: #f0883e } .t1 { fill: #4493f8 } .t2 { fill: #f0883e }
.b { fill: #151b23; stroke: #656c76 } .b1 { fill: #0c2d4d; stroke: #4493f8 } .b2 { fill: #3d2410; stroke: #f0883e }
}
"""

Points = Iterable[tuple[float, float]]


def number(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """One line of text; y is its baseline."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{escape(content)}</text>'


def line(points: Points, kind: str = "l") -> str:
    """A line through points."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"/>'


def arrow(points: Sequence[tuple[float, float]], kind: str = "l", head: str = "head") -> str:
    """A line along horizontal and vertical parts, with a head at its end."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    back, side = (x - 6 * dx, y - 6 * dy), (3.5 * dy, 3.5 * dx)
    corners = [(x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
    path = " ".join(f"{number(a)},{number(b)}" for a, b in corners)
    return line([*points[:-1], back], kind) + f'<polygon points="{path}" class="{head}"/>'


def box(x: float, y: float, width: float, height: float, content: str, kind: str = "b") -> str:
    """A rectangle with a centred line of text."""
    rectangle = f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    label = text(x + width / 2, y + height / 2 + 4, content, "mid" if width > 80 else "mid small")
    return f'{rectangle} rx="4" class="{kind}"/>' + (label if content else "")


def drawing(width: int, height: int, name: str, description: str, parts: Iterable[str]) -> str:
    """A whole SVG file."""
    page = f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6" class="page"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n<title>{escape(name)}</title>\n<desc>{escape(description)}</desc>\n'
        f"<style>{STYLE}</style>\n" + "\n".join([page, *parts]) + "\n</svg>\n"
    )


def read_curve(path: Path, columns: Sequence[str]) -> list[tuple[float, ...]]:
    """These columns of a curve's rows.

    Raises:
        ValueError: the file is missing or holds no row.
    """
    if not path.is_file():
        raise ValueError(f"{path.as_posix()}: no such file; `make repro` trains the model and writes it")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [tuple(float(row[column]) for column in columns) for row in csv.DictReader(file)]
    if not rows:
        raise ValueError(f"{path.as_posix()}: expected at least one row; `make repro` writes it")
    return rows


def running_mean(rows: Sequence[tuple[float, ...]], reach: int) -> list[tuple[float, float]]:
    """(x, mean of y) of each row with as many neighbours on both sides, `reach` at most."""
    means = []
    for i, row in enumerate(rows):
        side = min(reach, i, len(rows) - 1 - i)
        window = rows[i - side : i + side + 1]
        means.append((row[0], sum(near[1] for near in window) / len(window)))
    return means


def loss_figure(train: Sequence[tuple[float, ...]], val: Sequence[tuple[float, ...]]) -> str:
    """Loss over updates: training with its running mean, held-out text with its bits per byte.

    Args:
        train: rows of (step, loss).
        val: rows of (step, loss, bits per byte).
    """
    width, height, left, right, top, bottom = 820, 330, 48, 24, 52, 40
    last = max(row[0] for row in (*train, *val))
    losses = [row[1] for row in (*train, *val)]
    low, high = int(min(losses) * 2) / 2, -int(-max(losses) * 2 - 1) / 2

    def place(row: tuple[float, ...]) -> tuple[float, float]:
        x = left + (width - left - right) * row[0] / last
        return x, top + (height - top - bottom) * (high - row[1]) / (high - low)

    parts = [text(left - 32, 26, "Pretraining: loss in nats per token", "title")]
    every = max(1, round((high - low) / 4))
    for level in range(int(low) + (low > int(low)), int(high) + 1, every):
        y = place((0, level))[1]
        parts.append(line([(left, y), (width - right, y)], "grid"))
        parts.append(text(left - 8, y + 4, str(level), "soft end"))
    tick = max(1, round(last / 7, -2 if last >= 700 else 0))
    for step in range(0, int(last) + 1, int(tick)):
        parts.append(text(place((step, low))[0], height - bottom + 18, f"{step:,}", "soft mid"))
    parts.append(text(width / 2, height - 8, "updates", "soft mid"))
    parts.append(line(map(place, train), "l1 faint"))
    parts.append(line(map(place, running_mean(train, REACH)), "l1 thick"))
    parts.append(line(map(place, val), "l2 thick"))
    for row in val:
        x, y = place(row)
        parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="4" class="head t2"/>')
        parts.append(text(x, y - 10, f"{row[2]:.2f}", "mid t2" if row[0] < last else "end t2"))
    x = width - right
    parts.append(text(x, 26, "held-out text, with its bits per byte", "t2 end"))
    parts.append(text(x, 44, "training: an update, and the running mean", "t1 end"))
    end = f"{val[-1][1]:.2f} nats per token and {val[-1][2]:.3f} bits per byte"
    description = f"The held-out loss falls to {end} after {last:,.0f} updates."
    return drawing(width, height, "Pretraining loss", description, parts)


def stage_row() -> list[str]:
    """The six stages, what each writes, and the inputs that skip stages."""
    stages = {
        "download": "text, conversations",
        "train_bpe": "tokenizer.json",
        "shard": "uint16 tokens",
        "pretrain": "base model",
        "sft": "chat model",
        "eval": "metrics, report",
    }
    y, width, height, gap, left = 92, 112, 30, 22, 19
    middle = {name: left + i * (width + gap) + width / 2 for i, name in enumerate(stages)}
    parts = [text(16, 26, "stages/: the pipeline. DVC runs what is out of date.", "title")]
    for i, (name, out) in enumerate(stages.items()):
        x = middle[name] - width / 2
        parts.append(box(x, y, width, height, name, "b1" if name in ("pretrain", "sft", "eval") else "b"))
        parts.append(text(middle[name], y + height + 16, out, "mid small soft"))
        if i:
            parts.append(arrow([(x - gap, y + height / 2), (x, y + height / 2)]))
    for source, level, shift, targets in (
        ("download", 46, -16, ("sft", "eval")),
        ("train_bpe", 68, 0, ("pretrain", "sft", "eval")),
    ):
        start, turn = middle[source] + shift, (middle[targets[-1]] + shift, level)
        parts.append(arrow([(start, y), (start, level), turn, (turn[0], y)]))
        for target in targets[:-1]:
            x = middle[target] + shift
            parts.append(arrow([(x, level), (x, y)]))
    parts.append(text(middle["download"] - 8, 60, "conversations", "small soft"))
    parts.append(text(middle["train_bpe"] + 8, 82, "tokenizer", "small soft"))
    for name in ("pretrain", "sft", "eval"):
        parts.append(arrow([(middle[name], 144), (middle[name], 178)], "l1", "t1"))
    return parts


def transformer_rows() -> list[str]:
    """A model's operations forward and backward, with the residual stream above and its gradient below."""
    block = ("norm", "qkv", "rope", "attn", "proj", "norm", "up", "act", "down")
    names = ("embed", *block, "norm", "heads", "loss")
    left, width, gap, height, up, down = 28, 53, 6, 28, 262, 330
    x = [left + i * (width + gap) for i in range(len(names))]
    middle = [edge + width / 2 for edge in x]
    parts = [f'<rect x="{x[1] - 3}" y="236" width="{x[10] - x[1]}" height="148" rx="6" class="l dot"/>']
    parts.append(
        text(x[1] + 4, 230, "one block, repeated: a branch is an Euler step, x + f(norm(x))", "small")
    )
    parts.append(text(x[11], 252, "forward \u2192", "t1") + text(x[11], 376, "\u2190 backward", "t2"))
    for i, name in enumerate(names):
        parts.append(box(x[i], up, width, height, name, "b1"))
        parts.append(box(x[i], down, width, height, "dlogits" if name == "loss" else f"d{name}", "b2"))
        if i not in (0, 1, 6, 10):  # which take their input from the stream
            parts.append(line([(x[i] - gap, up + height / 2), (x[i], up + height / 2)], "l1"))
            parts.append(line([(x[i] - gap, down + height / 2), (x[i], down + height / 2)], "l2"))
        if 0 < i < 11:
            parts.append(line([(middle[i], up + height), (middle[i], down)], "l dot"))
    parts.append(text(middle[10] + 6, 314, "saved", "small soft"))
    to_stream, from_stream = (0, 5, 9), (1, 6, 10)
    for kind, head, level, edge in (("l1", "t1", 248, up), ("l2", "t2", 372, down + height)):
        writers, readers = (to_stream, from_stream) if kind == "l1" else (from_stream, to_stream)
        parts += [arrow([(middle[i], edge), (middle[i], level)], kind, head) for i in writers]
        parts += [arrow([(middle[i], level), (middle[i], edge)], kind, head) for i in readers]
        sums = [i for i in writers if 0 < i < 10]
        parts += [text(middle[i] + 6, level + (12 if kind == "l1" else -4), "+", head) for i in sums]
        parts.append(line([(middle[0], level), (middle[10], level)], f"{kind} thick"))
    return parts


def pipeline_figure() -> str:
    """The pipeline above, the engine that its training and evaluation call below."""
    parts = stage_row()
    parts.append('<rect x="16" y="180" width="788" height="290" rx="6" class="l"/>')
    parts.append(text(28, 204, "kernels/: the engine. It knows arrays, not files.", "title"))
    parts.append(text(792, 204, "Engine: micro_step x n, clip, update (AdamW or Muon)", "end soft"))
    parts += transformer_rows()
    parts.append(arrow([(410, 388), (410, 402)]))
    parts.append(box(28, 404, 376, 28, "kernels/cpu/<op>.py: Numba loops, the reference"))
    parts.append(box(416, 404, 376, 28, "kernels/cuda/<op>.cu: CUDA kernels, compiled by NVRTC"))
    shared = "Both have the same <op>_forward and <op>_backward. Tests compare CUDA with the CPU in float64."
    parts.append(text(410, 454, shared, "mid small soft"))
    description = (
        "Six stages: download, train_bpe, shard, pretrain, sft, eval. The last three call the engine, whose "
        "model "
        "runs forward and backward over operations that exist for the CPU and for CUDA."
    )
    return drawing(820, 486, "Pipeline and engine", description, parts)


def run(argv: list[str]) -> None:
    """Writes both figures.

    Raises:
        ValueError: an argument was given, or a curve is missing.
    """
    if argv:
        raise ValueError(f"{argv[0]}: docs.figures takes no arguments")
    train = read_curve(CURVES / "train.csv", ("step", "loss"))
    val = read_curve(CURVES / "val.csv", ("step", "val_loss", "val_bpb"))
    write_text(DOCS / "loss.svg", loss_figure(train, val))
    write_text(DOCS / "pipeline.svg", pipeline_figure())


def main() -> None:
    """Runs the command; what its user can repair is one line on standard error."""
    command_main(run)


if __name__ == "__main__":
    main()
