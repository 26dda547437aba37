"""What the default policy finds on recorded loads: the committed results, and the page that shows
them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.retention import POLICIES, RESULTS, costs, main, table

PAGE = Path(__file__).parents[2] / "docs" / "retention.md"
ROWS = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
FOUND = {(row["trace"], row["capacity_gb"], row["policy"]): row for row in ROWS}
OWN, LRU = "retention", "least recently used"


def gains() -> dict[tuple[str, float], float]:
    return {
        (trace, gb): row["tokens_hit"] / FOUND[trace, gb, LRU]["tokens_hit"] - 1
        for (trace, gb, policy), row in FOUND.items()
        if policy == OWN
    }


def test_it_loses_no_more_than_one_percent_anywhere_and_gains_five_where_memory_is_short() -> None:
    found = gains()
    assert {trace for trace, _ in found} == {"conversation", "synthetic"}
    assert min(found.values()) >= -0.01
    for trace in ("conversation", "synthetic"):
        assert max(gain for (name, gb), gain in found.items() if name == trace and gb < 35) >= 0.05


def test_results_say_when_and_where() -> None:
    assert all(row["date"] and row["machine"] and row["policy"] in POLICIES for row in ROWS)


def test_the_page_shows_the_results() -> None:
    """`python -m benchmarks.retention --table` prints it."""
    page = PAGE.read_text(encoding="utf-8")
    assert table(ROWS) in page
    assert costs(ROWS) in page


def test_a_trace_is_measured(tmp_path: Path) -> None:
    trace, results = tmp_path / "trace.jsonl", tmp_path / "results.jsonl"
    lines = [
        {"timestamp": nth, "input_length": 1100, "output_length": 1, "hash_ids": names}
        for nth, names in enumerate(2 * [[0, 1, 2], [0, 3, 4], [0, 5, 6]])
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    given = ["--trace", f"t={trace}", "--capacity-gb", "1", "--results", str(results)]
    assert main(given) == 0
    found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [row["policy"] for row in found] == [LRU, OWN]
    assert all(row["tokens_asked"] == 6600 for row in found)
