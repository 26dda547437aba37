"""docs/operations has every metric, and its dashboard asks for nothing else."""

from __future__ import annotations

import json

from tools import metric_table


def test_the_table_has_every_metric_and_label() -> None:
    """`python -m tools.metric_table` puts it right."""
    text = metric_table.PAGE.read_text("utf-8")
    assert metric_table.with_table(text) == text


def test_the_dashboard_asks_for_metrics_that_are_there() -> None:
    text = metric_table.PAGE.read_text("utf-8")
    table = text[text.index(metric_table.BEGIN) :]
    known = metric_table.named(table)
    board = json.loads((metric_table.PAGE.parent / "grafana.json").read_text("utf-8"))
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            asked |= {name.removesuffix("_bucket") for name in metric_table.named(target["expr"])}
    assert len(asked) > 10
    assert asked <= known
    assert metric_table.named(text[: text.index(metric_table.BEGIN)]) <= known


def test_no_label_value_has_a_blank_where_states_are_listed() -> None:
    states = {
        value
        for family in metric_table.families()
        for sample in family.samples
        for label, value in sample.labels.items()
        if label in ("state", "what", "reason")
    }
    assert "in_flight" in states
    assert not [state for state in states if " " in state]
