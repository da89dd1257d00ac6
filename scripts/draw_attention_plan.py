#!/usr/bin/env python3
"""Draw docs/attention-plan.svg: what each of two threads computes of a batch of unequal lengths."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from moestro.ops.attention_plan import (  # noqa: E402
    SUPER_TILE,
    AttentionPlan,
    PlanShape,
    PlanTask,
    cut_units,
    find_units,
    make_plan,
    position_cost,
)

OUT = ROOT / "docs" / "attention-plan.svg"
LENGTHS = (32768, *(1024,) * 15)
SHAPE = PlanShape(num_heads=8, num_kv_heads=1, head_dim=128, row_bytes=512, num_parts=2)
LEFT, WIDTH, BAR, GAP = 150, 700, 26, 8
LONG, SHORT, EDGE = "#4c78a8", "#f2b56b", "#ffffff"


def loads(plan: AttentionPlan, starts: list[int]) -> list[list[tuple[PlanTask, int]]]:
    """The tasks of each part with their costs, taken in order by whoever is free."""
    units = {(u.seq, u.block): u for u in find_units(starts, list(LENGTHS), SHAPE)}
    parts: list[list[tuple[PlanTask, int]]] = [[] for _ in range(SHAPE.num_parts)]
    for task in plan.tasks:
        unit = units[task.seq, task.block]
        positions = min(task.end * SUPER_TILE, unit.length) - task.begin * SUPER_TILE
        least = min(parts, key=lambda part: sum(cost for _, cost in part))
        least.append((task, positions * position_cost(SHAPE, unit.rows)))
    return parts


def draw() -> str:
    starts = list(range(len(LENGTHS) + 1))
    units = find_units(starts, list(LENGTHS), SHAPE)
    whole = [unit.num_supers for unit in units]
    rows = [
        ("one thread a request", loads(cut_units(units, whole, SHAPE), starts)),
        ("the plan", loads(make_plan(starts, list(LENGTHS), SHAPE), starts)),
    ]
    longest = max(sum(c for _, c in part) for _, parts in rows for part in parts)
    lines, y = [], 46
    for title, parts in rows:
        lines.append(f'<text x="{LEFT}" y="{y - 10}" class="title">{title}</text>')
        for number, part in enumerate(parts):
            lines.append(f'<text x="{LEFT - 10}" y="{y + 18}" class="side">thread {number}</text>')
            x = float(LEFT)
            for task, cost in part:
                width = WIDTH * cost / longest
                fill = LONG if task.seq == 0 else SHORT
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{fill}" '
                    f'stroke="{EDGE}"/>'
                )
                if task.seq == 0 and width > 40:
                    lines.append(
                        f'<text x="{x + width / 2:.1f}" y="{y + 17}" class="in">'
                        f"{task.begin}-{task.end - 1}</text>"
                    )
                x += width
            y += BAR + GAP
        y += 34
    lines.append(f'<text x="{LEFT}" y="{y}" class="note">time (cost)</text>')
    lines.append(
        f'<rect x="{LEFT + 140}" y="{y - 12}" width="14" height="14" fill="{LONG}"/>'
        f'<text x="{LEFT + 160}" y="{y}" class="note">32,768 tokens: its super-tiles</text>'
        f'<rect x="{LEFT + 400}" y="{y - 12}" width="14" height="14" fill="{SHORT}"/>'
        f'<text x="{LEFT + 420}" y="{y}" class="note">15 sequences of 1,024</text>'
    )
    style = (
        "text{font-family:sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}"
        ".side{font-size:12px;text-anchor:end}.in{font-size:10px;fill:#fff;text-anchor:middle}"
        ".note{font-size:12px}"
    )
    body = "\n".join(lines)
    width, height = LEFT + WIDTH + 20, y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    OUT.write_text(draw())
    print(f"written: {OUT.relative_to(ROOT)}")
