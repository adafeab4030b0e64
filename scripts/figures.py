#!/usr/bin/env python3
"""Makes the pictures of the documentation from docs/figures/data: `scripts/figures.py`, or `--check` to compare.

Each data file says where its figures were measured. Only Python's standard library is used, and equal data give
equal files, so a test can tell a picture that was not made again.
"""

import json
import sys
from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
INK, PALE, LINE = "#222222", "#ffffff", "#555555"
BLUE, GREEN, ORANGE, GREY, YELLOW, RED = "#cfe2f7", "#d5ecd0", "#fbd9b5", "#c9c9c9", "#f0f0c0", "#f7cfcf"
STRONG = ["#2b6cb0", "#c05621", "#2f855a"]


class Picture:
    """Shapes on a white ground, which reads on light and dark pages."""

    def __init__(self, title, width, height):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="13" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PALE}"/>',
        ]

    def text(self, x, y, words, anchor="middle", size=13, fill=INK, more=""):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{more}>{escape(words)}</text>'
        )

    def box(self, x, y, width, height, fill, words=(), round_=4):
        self.parts.append(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="{round_}" fill="{fill}" '
            f'stroke="{LINE}" stroke-width="0.8"/>'
        )
        middle = y + height / 2 + 4.5 - 8 * (len(words) - 1)
        for number, line in enumerate(words):
            self.text(x + width / 2, middle + 16 * number, line, size=12 if number else 13)

    def arrow(self, points, words="", at=None):
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{LINE}" marker-end="url(#tip)"/>')
        if words:
            self.text(*at, words, size=12)

    def line(self, points, stroke):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.8"/>')

    def svg(self):
        return "\n".join([*self.parts, "</svg>", ""])


def pipeline(_):
    """What goes from command to command."""
    picture = Picture("From conversations to a served drafter", 780, 250)
    commands = {
        "regenerate": (20, "regenerate", "the target answers"),
        "prepare": (175, "prepare", "tokens, loss masks"),
        "train": (330, "train", "drafter, checkpoints"),
        "eval": (485, "eval", "acceptance, speed"),
        "push": (640, "push", "the Hub, model card"),
    }
    for x, name, what in commands.values():
        picture.box(x, 40, 120, 50, BLUE, (name, what))
    for left, right in [(140, 175), (295, 330), (450, 485), (605, 640)]:
        picture.arrow([(left, 65), (right, 65)])
    picture.text(80, 25, "conversations", size=12)
    picture.arrow([(80, 29), (80, 40)])
    picture.box(175, 150, 275, 50, GREEN, ("hidden-server, a stock vLLM, or --colocate", "the target's hidden states"))
    picture.arrow([(390, 150), (390, 90)], "states", (416, 124))
    picture.arrow([(350, 90), (350, 150)], "token ids", (316, 124))
    picture.box(485, 130, 120, 40, ORANGE, ("generate, serve",))
    picture.box(485, 185, 120, 40, ORANGE, ("export",))
    picture.arrow([(450, 80), (467, 80), (467, 150), (485, 150)])
    picture.arrow([(467, 150), (467, 205), (485, 205)])
    picture.text(622, 210, "vLLM, llama.cpp, speculators", "start", 12)
    picture.text(622, 155, "OpenAI clients", "start", 12)
    return picture


def verify(data):
    """One block: what was proposed, and what the target made of it."""
    tokens, accepted = data["proposed"], data["accepted"]
    picture = Picture("A block being verified", 700, 190)
    width = 600 / (len(tokens) + 1)
    for slot, token in enumerate([data["anchor"], *tokens]):
        fill = GREY if slot == 0 else GREEN if slot <= accepted else RED
        x = 80 + slot * width
        picture.text(x + width / 2, 30, "anchor" if slot == 0 else f"slot {slot}", size=12)
        picture.box(x, 40, width - 6, 34, fill)
        cut = ' text-decoration="line-through"' if slot > accepted else ""
        picture.text(x + width / 2 - 3, 61, token.replace(" ", "\u2423"), more=cut + ' font-family="monospace"')
    picture.text(70, 61, "draft", "end")
    picture.text(70, 121, "target", "end")
    for slot in range(accepted + 1):
        x = 80 + (slot + 1) * width
        token = tokens[slot] if slot < accepted else data["own"]
        picture.box(x, 100, width - 6, 34, GREEN if slot < accepted else YELLOW)
        picture.text(x + width / 2 - 3, 121, token.replace(" ", "\u2423"), more=' font-family="monospace"')
    own = "and one token of its own" if accepted < len(tokens) else "and one token more"
    picture.text(350, 168, f"one pass of the target keeps {accepted} proposed tokens, {own}: {accepted + 1} tokens", size=12)
    return picture


def axes(picture, box, title, xs, ys):
    """A frame with ticks; gives the map from data to the picture."""
    left, top, right, bottom = box
    picture.text((left + right) / 2, top - 10, title)
    at_x = lambda x: left + (right - left) * (x - xs[0]) / (xs[-1] - xs[0])
    at_y = lambda y: bottom - (bottom - top) * (y - ys[0]) / (ys[-1] - ys[0])
    for y in ys:
        picture.parts.append(f'<path d="M{left} {at_y(y):.1f} H{right}" stroke="#dddddd"/>')
        picture.text(left - 6, at_y(y) + 4, f"{y:g}", "end", 11)
    for x in xs:
        picture.text(at_x(x), bottom + 16, f"{x:g}", size=11)
    return at_x, at_y


def ticks(least, most, step):
    return [round(least + step * n, 6) for n in range(int(round((most - least) / step)) + 1)]


def training(data):
    """Loss and expected acceptance length over the steps of a run; the first losses, of fresh weights, lie above."""
    picture = Picture("Loss and expected acceptance length of a run", 700, 250)
    steps = data["step"]
    xs = ticks(0, max(steps), max(steps) / 3)
    at_x, at_y = axes(picture, (50, 40, 330, 200), "loss, nats", xs, ticks(0, 8, 2))
    shown = [(at_x(x), at_y(y)) for x, y in zip(steps, data["loss"]) if y <= 8]
    picture.line(shown, STRONG[0])
    top = -(-max(data["expected_acceptance_length"]) // 1)
    at_x, at_y = axes(picture, (400, 40, 680, 200), "expected acceptance length, tokens", xs, ticks(1, top, (top - 1) / 2))
    picture.line([(at_x(x), at_y(y)) for x, y in zip(steps, data["expected_acceptance_length"])], STRONG[2])
    picture.text(350, 240, data["caption"], size=12)
    return picture


def acceptance(data):
    """How far blocks are accepted."""
    slots = data["acceptance_by_slot"]
    picture = Picture("Acceptance by slot", 560, 240)
    at_x, at_y = axes(picture, (60, 40, 540, 190), "share of verify steps in which the slot was accepted", [0, 1], ticks(0, 1, 0.25))
    del at_x
    width = 480 / len(slots)
    picture.parts.append(f'<rect x="55" y="191" width="500" height="20" fill="{PALE}"/>')
    for number, share in enumerate(slots):
        x = 60 + number * width
        picture.box(x + 6, at_y(share), width - 12, 190 - at_y(share), BLUE, round_=0)
        picture.text(x + width / 2, at_y(share) - 4, f"{100 * share:.0f}%", size=11)
        picture.text(x + width / 2, 206, f"slot {number + 1}", size=11)
    picture.text(300, 230, data["caption"], size=12)
    return picture


def decode(data):
    """Tokens per second of both programs, plain and with a drafter."""
    rows = data["rows"]
    picture = Picture("Decoding speed next to llama.cpp", 680, 60 + 62 * len(rows))
    most = max(max(row[key]) for row in rows for key in ("plain", "speculative"))
    for number, name in enumerate(["plain", "with the drafter"]):
        picture.box(180 + 150 * number, 10, 14, 14, [GREEN, BLUE][number], round_=0)
        picture.text(200 + 150 * number, 22, name, "start", 12)
    for number, row in enumerate(rows):
        y = 36 + 62 * number
        picture.text(8, y + 28, row["name"], "start", 12)
        for line, (who, index) in enumerate([("dflash", 0), ("llama.cpp", 1)]):
            picture.text(172, y + 13 + 26 * line, who, "end", 12)
            for part, (key, fill) in enumerate([("plain", GREEN), ("speculative", BLUE)]):
                value = row[key][index]
                top = y + 26 * line + 11 * part
                picture.box(180, top, 400 * value / most, 10, fill, round_=0)
                picture.text(186 + 400 * value / most, top + 9, f"{value:,}", "start", 10)
    picture.text(340, 50 + 62 * len(rows), data["caption"], size=12)
    return picture


def time(data):
    """Shares of a training step."""
    picture = Picture("Where time goes in a training step", 660, 70 + 44 * len(data["rows"]))
    fills = [BLUE, GREEN, ORANGE, GREY, YELLOW]
    for number, row in enumerate(data["rows"]):
        y, x, whole = 40 + 44 * number, 190, sum(row["shares"])
        picture.text(180, y + 20, row["name"], "end", 12)
        for share, fill in zip(row["shares"], fills):
            width = 440 * share / whole
            picture.box(x, y, width, 30, fill, round_=0)
            if share > 20:
                picture.text(x + width / 2, y + 20, f"{share}%")
            x += width
    for number, part in enumerate(data["parts"]):
        x = [20, 190, 300, 380, 520][number]
        picture.box(x, 10, 12, 12, fills[number], round_=0)
        picture.text(x + 17, 21, part, "start", 12)
    return picture


def main():
    check = "--check" in sys.argv[1:]
    stale = []
    for draw in [pipeline, verify, training, acceptance, decode, time]:
        source = FIGURES / "data" / f"{draw.__name__}.json"
        data = json.loads(source.read_text()) if source.exists() else None
        path, svg = FIGURES / f"{draw.__name__}.svg", draw(data).svg()
        if check and (not path.exists() or path.read_text() != svg):
            stale.append(path.name)
        elif not check:
            path.write_text(svg)
    if stale:
        sys.exit(f"not what scripts/figures.py makes of docs/figures/data: {', '.join(stale)}")


if __name__ == "__main__":
    main()
