"""The drawings of docs/concepts, written as SVG: `python -m tools.drawings`.

Plain shapes on a light background, so that they read the same in both modes of the site. Numbers
come from the model, not from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
INK, PALE, LINE = "#1f2937", "#6b7280", "#9ca3af"
WINDOW, CSA, HCA, KEYS, TAIL, QUERY = (
    *("#bfdbfe", "#bbf7d0", "#fde68a"),
    *("#ddd6fe", "#fecaca", "#e5e7eb"),
)


class Drawing:
    """Shapes, in the order in which they are put on the paper."""

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.title, self.size = name, title, (width, height)
        self.shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        text: str = "",
        *,
        size: int = 13,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>'
        )
        lines = text.split("\n") if text else []
        for n, line in enumerate(lines):
            middle = y + h / 2 + size * 0.36 + (n - (len(lines) - 1) / 2) * size * 1.25
            self.text(x + w / 2, middle, line, size=size, anchor="middle")

    def row(self, x: float, y: float, w: float, h: float, fills: Iterable[str]) -> None:
        for n, fill in enumerate(fills):
            self.box(x + n * w, y, w, h, fill)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{colour}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.shapes.append(
            f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.3"{dash} '
            'marker-end="url(#tip)"/>'
        )

    def brace(self, x: float, w: float, y: float, text: str, *, above: bool = False) -> None:
        """A span under (or over) something, and what it is."""
        tick = 6 if above else -6
        self.shapes.append(
            f'<path d="M{x:g},{y + tick:g} V{y:g} H{x + w:g} V{y + tick:g}" fill="none" '
            f'stroke="{PALE}"/>'
        )
        self.text(x + w / 2, y - 6 if above else y + 16, text, anchor="middle", colour=PALE)

    def svg(self) -> str:
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            f'font-family="ui-sans-serif, system-ui, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" '
            f'fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


def query(spec: ModelSpec) -> Drawing:
    at = Drawing("query", "What a query of each kind of layer reads", 860, 420)
    for n, (name, note) in enumerate(
        (
            ("window-only layer", "the newest tokens, nothing else"),
            ("CSA layer", f"the window, and {spec.index_topk} entries that its indexer selects"),
            ("HCA layer", "the window, and all entries"),
        )
    ):
        y = 40 + n * 128
        at.text(20, y, name, bold=True, size=14)
        at.text(20, y + 19, note, colour=PALE)
        top = y + 36
        if n == 1:
            read = {1, 4, 5, 9, 12, 16, 17, 20}
            at.row(20, top, 22, 26, (CSA if i in read else "#ffffff" for i in range(23)))
            at.brace(20, 23 * 22, top + 34, "entries: one for every 4 tokens; selected ones filled")
        elif n == 2:
            at.row(20, top, 100, 26, [HCA] * 5)
            at.brace(20, 500, top + 34, "entries: one for every 128 tokens, all read")
        else:
            at.text(20, top + 18, "older tokens are out of reach of this layer", colour=PALE)
        at.row(560, top, 20, 26, [WINDOW] * 10)
        if n:
            at.brace(560, 200, top + 34, "window")
        else:
            at.brace(560, 200, top + 34, f"window: {spec.window} tokens, each as it is")
        at.box(790, top, 50, 26, QUERY, "query")
    return at


def csa(spec: ModelSpec) -> Drawing:
    at = Drawing("csa", "A CSA entry pools its group and the one before", 860, 300)
    at.text(20, 30, "tokens", bold=True)
    for group in range(4):
        for n in range(4):
            token = 4 * group + n
            at.box(100 + token * 45, 14, 40, 26, QUERY, str(token))
        at.brace(100 + group * 180, 175, 48, f"group {group}")
    for stream, y in (("stream a", 92), ("stream b", 128)):
        at.text(20, y + 17, stream, bold=True)
        for token in range(16):
            on = (stream == "stream a" and 8 <= token < 12) or (
                stream == "stream b" and 4 <= token < 8
            )
            at.box(100 + token * 45, y, 40, 24, CSA if on else "#ffffff")
    at.arrow((190 + 180, 152), (480, 196))
    at.arrow((460 + 90, 116), (520, 196))
    at.box(400, 198, 240, 30, CSA, "softmax over gates, per channel")
    at.arrow((520, 228), (520, 252))
    at.box(430, 254, 180, 30, CSA, "entry 2: key and value")
    at.text(20, 262, "Every token has a vector and a gate in both", colour=PALE)
    at.text(20, 280, "streams. Entry 2 is stored when token 11 is there.", colour=PALE)
    return at


def hca(spec: ModelSpec) -> Drawing:
    at = Drawing("hca", "An HCA entry is 128 tokens, groups do not overlap", 860, 220)
    for group in range(3):
        x = 20 + group * 250
        full = group < 2
        at.row(x, 30, 14, 26, [HCA if full or n < 7 else "#ffffff" for n in range(17)])
        at.brace(x, 238, 64, f"tokens {128 * group:,} to {128 * group + 127:,}")
        if full:
            at.arrow((x + 119, 92), (x + 119, 130))
            at.box(x + 49, 132, 140, 30, HCA, f"entry {group}")
        else:
            at.arrow((x + 119, 92), (x + 119, 130), dashed=True)
            at.box(x + 39, 132, 160, 30, TAIL, "unfinished: in the tail")
    at.text(
        20,
        195,
        "Every query reads every entry. At a context of 1,048,576 tokens that is 8,192 of them.",
        colour=PALE,
    )
    return at


def indexer(spec: ModelSpec) -> Drawing:
    at = Drawing("indexer", "The indexer selects entries for a token", 860, 300)
    at.box(20, 30, 150, 46, QUERY, f"index query\n{spec.index_heads} heads x 128")
    at.box(20, 120, 150, 46, KEYS, "index keys\none per entry")
    at.arrow((170, 53), (238, 90))
    at.arrow((170, 143), (238, 106))
    at.box(240, 75, 130, 46, QUERY, "scores\none per entry")
    at.arrow((370, 98), (408, 98))
    at.box(410, 75, 150, 46, KEYS, f"exact top-{spec.index_topk}\nties: lowest index")
    at.arrow((560, 98), (598, 98))
    at.box(600, 75, 100, 46, CSA, "selected\nentries")
    at.arrow((700, 98), (738, 98))
    at.box(740, 75, 100, 46, QUERY, "attention")
    at.text(20, 205, "score(entry) = sum over heads of  weight(head) x max(0, query(head) . key)")
    at.text(
        20,
        232,
        "Keys are 4-bit numbers with scales: 68 bytes for an entry of 584. Scoring all of them is",
        colour=PALE,
    )
    at.text(
        20,
        250,
        "what a CSA layer pays at long contexts; attention itself reads a bounded number of rows.",
        colour=PALE,
    )
    return at


def token(spec: ModelSpec) -> Drawing:
    at = Drawing("token", "A token's way through the cache of a CSA layer", 860, 430)
    at.box(20, 190, 120, 60, QUERY, "hidden state\nof token p")
    rows = (
        (30, WINDOW, "key = value vector", "window ring, row p mod ring rows", "at once", 1),
        (110, TAIL, "vector and gate, a and b", "tails of the slot, row p mod rows", "at once", 1),
        (
            190,
            CSA,
            "pool 8 tokens",
            "entry p / 4 of its block",
            "when p is the last of its group",
            0,
        ),
        (270, TAIL, "index vector and gate", "index tails of the slot", "at once", 1),
        (
            350,
            KEYS,
            "pool 8 tokens",
            "index key p / 4 of its block",
            "when p is the last of its group",
            0,
        ),
    )
    for y, fill, what, where, when, direct in rows:
        if direct:
            at.arrow((140, 220), (180, 220), (180, y + 24), (218, y + 24))
        else:
            at.arrow((310, y - 32), (310, y - 2))
        at.box(220, y, 180, 48, "#ffffff", what)
        at.arrow((400, y + 24), (458, y + 24))
        at.box(460, y, 240, 48, fill, where)
        at.text(714, y + 20, when.split(" of ")[0], colour=PALE)
        if " of " in when:
            at.text(714, y + 38, "of " + when.split(" of ")[1], colour=PALE)
    at.text(20, 420, "One launch writes all of it for every request of a decode step.", colour=PALE)
    return at


def blocks(spec: ModelSpec, schema: CacheSchema) -> Drawing:
    at = Drawing("blocks", "Two arenas: blocks and slots", 860, 400)
    at.text(20, 28, "block table", bold=True)
    tables = (("request A", (0, 1, 4)), ("request B", (0, 1, 5)), ("request C", (2,)))
    for n, (name, ids) in enumerate(tables):
        at.text(20, 62 + n * 34, name)
        for i, block in enumerate(ids):
            at.box(110 + i * 42, 44 + n * 34, 38, 26, CSA, str(block))
    at.text(300, 28, f"block arena: {schema.block_tokens} tokens of all layers each", bold=True)
    names = ("A and B", "A and B", "C", "cached", "A", "B", "free")
    for n, name in enumerate(names):
        fill = {"free": "#ffffff", "cached": QUERY}.get(name, CSA)
        at.box(300 + n * 78, 44, 72, 60, fill, f"{n}\n{name}", size=12)
    at.text(300, 128, f"a block: {schema.bytes.block:,} bytes, one run", colour=PALE)
    at.text(20, 190, "slot arena: one slot per live request", bold=True)
    for n, name in enumerate(("A", "B", "C", "free")):
        at.box(20 + n * 205, 206, 195, 40, TAIL if name != "free" else "#ffffff", name)
    at.text(20, 268, f"a slot: {schema.bytes.slot:,} bytes, at any length", colour=PALE)
    at.text(20, 312, "in a block", bold=True)
    at.box(110, 296, 150, 26, CSA, "CSA entries")
    at.box(264, 296, 110, 26, KEYS, "index keys")
    at.box(378, 296, 110, 26, HCA, "HCA entries")
    at.text(20, 356, "in a slot", bold=True)
    at.box(110, 340, 150, 26, WINDOW, "window rings")
    at.box(264, 340, 224, 26, TAIL, "tails: unfinished groups")
    at.text(520, 314, "whole once written: shared, cached, sent", colour=PALE)
    at.text(520, 358, "changes with every token: never shared", colour=PALE)
    return at


def step() -> Drawing:
    at = Drawing("step", "A step's life", 860, 330)
    at.box(20, 40, 150, 56, QUERY, "admit_request\nslot, blocks, a hit?")
    at.arrow((170, 68), (208, 68))
    at.box(210, 40, 170, 56, QUERY, "prepare_forward\npositions, blocks: host")
    at.arrow((380, 68), (418, 68))
    at.box(420, 20, 250, 150, "#f9fafb")
    at.text(545, 40, "for each layer", anchor="middle", colour=PALE)
    at.box(440, 52, 210, 30, WINDOW, "append: writes ring, tails, entries", size=12)
    at.box(440, 88, 210, 30, KEYS, "select: CSA layers", size=12)
    at.box(440, 124, 210, 30, CSA, "attend: window and entries", size=12)
    at.arrow((670, 68), (708, 68))
    at.box(710, 40, 130, 56, QUERY, "commit\nlength moves")
    at.arrow((775, 96), (775, 220), (295, 220), (295, 98))
    at.text(420, 212, "next step", anchor="middle", colour=PALE)
    at.arrow((530, 170), (530, 262))
    at.box(470, 264, 120, 46, TAIL, "fail\nlength stays", size=12)
    at.text(604, 284, "after any error: nothing of the step", colour=PALE)
    at.text(604, 302, "is kept, and the next one can run", colour=PALE)
    at.box(20, 254, 210, 56, QUERY, "release_request\nslot free, blocks stay cached")
    at.arrow((775, 220), (775, 240), (125, 240), (125, 252))
    return at


def rings(spec: ModelSpec) -> Drawing:
    at = Drawing("rings", "The window ring of one layer, drawn with 8 rows", 860, 220)
    at.text(20, 30, "positions 0 to 12 were written; the length is 13", bold=True)
    for row in range(8):
        newest = max(p for p in range(13) if p % 8 == row)
        at.box(20 + row * 100, 70, 94, 44, WINDOW, f"row {row}\nposition {newest}", size=12)
    at.brace(20, 494, 124, "written last: positions 8 to 12")
    at.brace(520, 294, 124, "still those of 5 to 7")
    at.text(
        20,
        175,
        "Row of position p: p mod rows. Nothing is moved, cleared or counted; which rows are alive",
        colour=PALE,
    )
    at.text(
        20,
        193,
        "follows from the length. Drafts take more rows: a rejected token overwrites none.",
        colour=PALE,
    )
    return at


def replicas() -> Drawing:
    at = Drawing("replicas", "Replicas on Ray Serve", 860, 400)
    at.box(20, 150, 110, 60, QUERY, "client\nHTTP, streams")
    at.box(190, 150, 150, 60, WINDOW, "ingress\nfollows each answer")
    at.arrow((130, 180), (188, 180))
    at.box(190, 30, 150, 60, HCA, "router\nwho has which blocks")
    at.arrow((265, 150), (265, 92))
    at.text(190, 122, "ids, session", size=12, colour=PALE)
    at.text(272, 122, "→ replicas", size=12, colour=PALE)
    at.box(470, 110, 170, 54, CSA, "prefill replica\nthe prompt, one token")
    at.box(470, 230, 170, 54, KEYS, "decode replica\nthe other tokens")
    at.box(470, 310, 170, 54, KEYS, "decode replica")
    at.arrow((340, 165), (468, 137))
    at.text(352, 136, "1  prompt", size=12)
    at.arrow((340, 195), (468, 250))
    at.text(372, 192, "3  tokens so far, offer", size=12)
    at.arrow((265, 210), (265, 337), (468, 337), dashed=True)
    at.text(280, 328, "if the other one is lost", size=12, colour=PALE)
    at.arrow((555, 164), (555, 228))
    at.text(562, 200, "2  the request's memory, by NIXL", size=12)
    at.arrow((640, 125), (700, 60), (342, 60), dashed=True)
    at.text(420, 50, "block events, load: twice a second", size=12, colour=PALE)
    at.box(720, 230, 120, 134, TAIL, "tiers that\nreplicas share:\ndisk")
    at.arrow((640, 257), (718, 257))
    at.arrow((718, 337), (642, 337))
    at.text(20, 394, "Ray starts, places, restarts, scales and drains the processes.", colour=PALE)
    return at


def drawings() -> list[Drawing]:
    spec = ModelSpec.preset("v4-flash")
    return [
        *(query(spec), csa(spec), hca(spec), indexer(spec), rings(spec), token(spec)),
        *(blocks(spec, CacheSchema.build(spec)), step(), replicas()),
    ]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in drawings():
        (FOLDER / f"{each.name}.svg").write_text(each.svg(), encoding="utf-8")
