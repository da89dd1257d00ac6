"""Joins results of `moestro bench kv` into one file and draws them into one chart.

    PYTHONPATH=src python bench/kv_chart.py NAME RESULT.json...

writes NAME.json and NAME.svg. The results must be of one trace with the same costs: long curves
are measured piece by piece, with and without hints.
"""

import json
import sys
from pathlib import Path

from moestro.cli.bench.kv_report import draw_hits

_SAME = ("trace", "page_size", "step_costs", "move_costs", "num_requests", "commit")


def main() -> None:
    """See above."""
    name, *paths = sys.argv[1:]
    results = [json.loads(Path(path).read_text()) for path in paths]
    made = results[0]
    for result in results[1:]:
        for key in _SAME:
            if key == "num_requests" and result["points"][0]["lanes"] != made["points"][0]["lanes"]:
                continue  # more lanes need more sessions
            if result[key] != made[key]:
                sys.exit(f"{key} differs: {made[key]} and {result[key]}")
    made["command"] = [result["command"] for result in results]
    points = [point for result in results for point in result["points"]]
    made["points"] = sorted(
        points, key=lambda at: (at["lanes"], at["device_tokens"], at["pin_ttl_s"] or 0)
    )
    Path(f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    draw_hits(made, Path(f"{name}.svg"))


if __name__ == "__main__":
    main()
