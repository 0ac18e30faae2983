"""Plot decode steps of Flash, ours from stored rows and published ones, into docs/flash.svg.

python3 .ci/flash_plot.py benchmarks/results/h200/flash.jsonl
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {
    "SGLang, 4 x H200, MTP": {1: 3.37, 16: 8.42},
    "SGLang, 8 x H100, MTP": {1: 3.22, 16: 6.76},
    "vLLM, 2 x GH200, W4A16, no drafts": {1: 9.43},
    "vLLM, 2 x GH200, FP4, MTP": {1: 6.69},
    "vLLM, 2 x GH200, W4A16, 3 steps of MTP": {1: 5.18},
}
"""Milliseconds per token, by number of requests; docs/released.md names the sources."""
COLORS = ("#2563eb", "#60a5fa", "#0e7490", "#67c3d6", "#9aa5b1")
COLORS += ("#d1736a", "#e0a458", "#2f855a", "#86c29b", "#6b46c1")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 420, 60, 70, 290, 50
CONTEXT, MOST = 4096, 32


def lines(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return milliseconds per token, by number of requests, for each line of the plot. Only rows
    of the deepest model count."""
    layers = max(row["layers"] for row in rows)
    rows = [row for row in rows if row["layers"] == layers]
    ours = [row for row in rows if row["context"] == CONTEXT and row["step_ms"]]
    gpu = next(word for word in ours[0]["device"].split() if word[0] == "H" and word[1:].isdigit())
    found, bytes_of = dict[str, dict[int, float]](), dict[str, dict[int, float]]()
    for ranks in sorted({row["ranks"] for row in ours}):
        where, mine = f"{ranks} x {gpu}", [row for row in ours if row["ranks"] == ranks]
        decodes = {row["requests"]: row for row in mine if row["part"] == "decode"}
        drafts = {row["requests"]: row for row in mine if row["part"] == "draft"}
        found[f"ours, {where}, no drafts"] = {n: row["step_ms"] for n, row in decodes.items()}
        found[f"ours, {where}, 9 of 10 drafts right"] = {
            n: 1e3 * n / row["per_s_most"] for n, row in drafts.items()
        }
        if not bytes_of:
            name = f"bytes of a step at {where}'s rate"
            bytes_of[name] = {n: row["roofline_ms"] for n, row in decodes.items()}
    return {**found, **bytes_of, **PUBLISHED}


def svg(found: dict[str, dict[int, float]]) -> str:
    top = max(value for line in found.values() for value in line.values())
    step = next(each for each in (1, 2, 5, 10, 20) if top / each <= 6)
    most = step * math.ceil(top / step)
    x_of = lambda n: LEFT + (WIDTH - LEFT - RIGHT) * math.log2(n) / math.log2(MOST)  # noqa: E731
    y_of = lambda ms: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / most  # noqa: E731
    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>']
    text = '<text x="{:.1f}" y="{:.1f}" font-size="{}" text-anchor="{}" fill="#1f2933">{}</text>'
    out.append(text.format(24, 32, 17, "start", "DeepSeek-V4-Flash: milliseconds per token"))
    out.append(
        text.format(24, 52, 13, "start", "by requests; ours with contexts of 4k; lower is better")
    )
    for ms in range(0, most + 1, step):
        y = y_of(ms)
        out.append(f'<path d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}" stroke="#e4e7eb" fill="none"/>')
        out.append(text.format(LEFT - 8, y + 4, 12, "end", ms))
    below = HEIGHT - BOTTOM + 20
    out += [text.format(x_of(n), below, 12, "middle", n) for n in (1, 8, 16, 32)]
    for number, (name, points) in enumerate(found.items()):
        color, dash = COLORS[number], ' stroke-dasharray="5 4"' if "bytes" in name else ""
        places = [(x_of(n), y_of(ms)) for n, ms in sorted(points.items())]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"{dash}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places]
        y = TOP + 22 * number
        out.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y}" r="4" fill="{color}"/>')
        out.append(text.format(WIDTH - RIGHT + 30, y + 4, 12, "start", name))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    head += ' font-family="Helvetica, Arial, sans-serif">\n<title>Milliseconds per token</title>'
    return "\n".join([head, *out, "</svg>\n"])


def main(path: str) -> None:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows = [row for row in rows if row["ranks"] > 1 and row.get("model", "flash") == "flash"]
    newest = {(row["ranks"], row["part"], row["requests"], row["context"]): row for row in rows}
    target = Path(__file__).parents[1] / "docs" / "flash.svg"
    target.write_text(svg(lines(list(newest.values()))))
    print(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
