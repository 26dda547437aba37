"""docs/operations has every metric, and what it and its dashboard ask for finds something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from dsv4.errors import OfferError
from dsv4.testing import RandomModel
from tests.support.promql import QueryError, Vector, evaluated, scraped
from tools import metric_table


def test_the_table_has_every_metric_and_label() -> None:
    """`python -m tools.metric_table` puts it right."""
    text = metric_table.PAGE.read_text("utf-8")
    assert metric_table.with_table(text) == text


def expressions() -> Iterator[tuple[str, str]]:
    """Of the page's table of what to watch, and of the dashboard: where each stands, and itself."""
    text = metric_table.PAGE.read_text("utf-8")
    watched = text[text.index("## What to watch") : text.index("## All of them")]
    for line in watched.splitlines():
        if line.startswith("| ") and not line.startswith(("| question", "| ---")):
            question, cell = line.split(" | ")[:2]
            for expression in re.findall(r"`([^`]*dsv4_[^`]*)`", cell):
                yield question.removeprefix("| "), expression
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


PANELS = json.loads((metric_table.PAGE.parent / "grafana.json").read_text("utf-8"))["panels"]
EXPRESSIONS = list(expressions())


@pytest.fixture(scope="module")
def scrapes() -> tuple[Vector, Vector]:
    """Two of a server, between which a prompt of 300 tokens came and came again."""
    with metric_table.everything() as (manager, server):
        before = scraped(server.text().decode())
        model, prompt = RandomModel(manager.schema), [n % 32 for n in range(300)]
        for _ in range(2):
            request = manager.admit_request(prompt)
            assert request.resume is not None
            left = prompt[request.resume.start :]
            with manager.step([(request, len(left))], ids=left) as plan:
                model.logits(left, manager, plan)
            manager.release_request(request)
        return before, scraped(server.text().decode())


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_an_expression_finds_something(
    scrapes: tuple[Vector, Vector], where: str, expression: str
) -> None:
    """One whose sides have different labels would not, nor one whose metric is no more."""
    assert evaluated(expression, *scrapes)


def test_the_share_of_prompts_that_was_found(scrapes: tuple[Vector, Vector]) -> None:
    expression = next(text for where, text in EXPRESSIONS if where == "are prompts found again?")
    assert list(evaluated(expression, *scrapes).values()) == [256 / 600]


def test_sides_with_different_labels_match_nothing(scrapes: tuple[Vector, Vector]) -> None:
    """As in Prometheus: `promtool test rules` says the same of these."""
    both = 'dsv4_blocks{state="free"} + %s dsv4_blocks{state="cached"}'
    assert evaluated(both % "", *scrapes) == {}
    assert list(evaluated(both % "ignoring(state)", *scrapes)) == [frozenset()]
    with pytest.raises(QueryError, match="many-to-many"):
        evaluated("dsv4_blocks + ignoring(state) dsv4_slots", *scrapes)


def test_every_panel_says_what_it_shows() -> None:
    assert len({panel["description"] for panel in PANELS}) == len(PANELS) > 10


def test_no_label_value_has_a_blank_where_states_are_listed() -> None:
    states = {
        value
        for _, family in metric_table.families()
        for sample in family.samples
        for label, value in sample.labels.items()
        if label in ("state", "what", "reason")
    }
    assert "in_flight" in states
    assert not [state for state in states if " " in state]


def test_every_reason_of_a_failed_arrival_is_counted_from_0() -> None:
    assert OfferError.__doc__ is not None
    told = re.findall(r'^ {8}"(\w+)"', OfferError.__doc__, re.MULTILINE)
    assert told == list(OfferError.reasons)
