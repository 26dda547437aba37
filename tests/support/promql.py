"""As much of PromQL as our pages and our dashboard use, over two scrapes of one process.

What counts is which series an operation matches: as in Prometheus, both sides need the same labels,
the metric's name and those after `ignoring` left out; a series without a partner is left out, and
two for one are an error. `rate` is the difference of the two scrapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import add, mul, sub

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
_NAME = "__name__"
_TOKEN = re.compile(r'\s*([a-zA-Z_]\w*|[0-9.]+|"[^"]*"|\[\w+\]|=|[-+*/(){},])')


class QueryError(Exception):
    """Prometheus would refuse it, or this file does not know it."""


def scraped(text: str) -> Vector:
    """The series of a page of metrics."""
    return {
        frozenset({_NAME: sample.name, **sample.labels}.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def evaluated(expression: str, before: Vector, after: Vector) -> Vector:
    """Its series after the second scrape, by labels. Raises QueryError."""
    query = _Query(_tokens(expression), before, after)
    found = query.sum()
    if query.tokens:
        raise QueryError(f"{expression!r} goes on after its end: {query.tokens}")
    assert isinstance(found, dict)
    return found


def _tokens(expression: str) -> list[str]:
    found, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise QueryError(f"{text[at:]!r} is not understood")
        found.append(match[1])
        at = match.end()
    return found


def without(labels: Labels, names: Iterable[str]) -> Labels:
    left_out = {_NAME, *names}
    return frozenset(pair for pair in labels if pair[0] not in left_out)


def _divided(one: float, other: float) -> float:
    return one / other if other else float("nan")


_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": add, "-": sub, "*": mul, "/": _divided,
}  # fmt: skip


@dataclass
class _Query:
    tokens: list[str]
    before: Vector
    after: Vector

    def take(self, *wanted: str) -> str:
        token = self.tokens.pop(0) if self.tokens else ""
        if wanted and token not in wanted:
            raise QueryError(f"{token!r} where {' or '.join(wanted)} should be")
        return token

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def sum(self) -> Vector | float:
        return self._operations(("+", "-"), self._product)

    def _product(self) -> Vector | float:
        return self._operations(("*", "/"), self._one)

    def _operations(
        self, operators: tuple[str, ...], operand: Callable[[], Vector | float]
    ) -> Vector | float:
        found = operand()
        while self.next() in operators:
            operator = _OPERATORS[self.take()]
            ignored = []
            if self.next() == "ignoring":
                self.take()
                ignored = self._names()
            found = _matched(operator, found, operand(), ignored)
        return found

    def _names(self) -> list[str]:
        self.take("(")
        names = []
        while self.next() != ")":
            names.append(self.take())
            if self.next() == ",":
                self.take()
        self.take(")")
        return names

    def _one(self) -> Vector | float:
        token = self.take()
        if token == "(":
            found = self.sum()
            self.take(")")
            return found
        if re.fullmatch(r"[0-9.]+", token):
            return float(token)
        if token == "rate":
            self.take("(")
            after, before = self._selected(self.take())
            if not re.fullmatch(r"\[[0-9]+[smh]\]", self.take()):
                raise QueryError("rate needs a time: [5m]")
            self.take(")")
            return {
                without(labels, ()): value - before.get(labels, value)
                for labels, value in after.items()
            }
        if token == "sum":
            kept = None
            if self.next() == "by":
                self.take()
                kept = self._names()
            return _summed(self._argument(), kept or [])
        if token == "histogram_quantile":
            self.take("(")
            quantile = float(self.take())
            self.take(",")
            buckets = self.sum()
            self.take(")")
            assert isinstance(buckets, dict)
            return _quantile(quantile, buckets)
        return self._selected(token)[0]

    def _argument(self) -> Vector:
        self.take("(")
        found = self.sum()
        self.take(")")
        assert isinstance(found, dict)
        return found

    def _selected(self, name: str) -> tuple[Vector, Vector]:
        wanted = {_NAME: name}
        if self.next() == "{":
            self.take()
            while self.next() != "}":
                label = self.take()
                self.take("=")
                wanted[label] = self.take().strip('"')
                if self.next() == ",":
                    self.take()
            self.take("}")
        one, other = (
            {labels: value for labels, value in each.items() if wanted.items() <= set(labels)}
            for each in (self.after, self.before)
        )
        return one, other


def _matched(
    operator: Callable[[float, float], float],
    one: Vector | float,
    other: Vector | float,
    ignored: list[str],
) -> Vector | float:
    if isinstance(one, float) or isinstance(other, float):
        if isinstance(one, float) and isinstance(other, float):
            return operator(one, other)
        if isinstance(one, float):
            assert isinstance(other, dict)
            return {without(labels, ()): operator(one, value) for labels, value in other.items()}
        assert isinstance(other, float)
        return {without(labels, ()): operator(value, other) for labels, value in one.items()}
    left, right = ({without(labels, ignored): labels for labels in side} for side in (one, other))
    if len(left) < len(one) or len(right) < len(other):
        raise QueryError("several series match one: many-to-many matching is not allowed")
    return {
        labels: operator(one[left[labels]], other[right[labels]])
        for labels in left
        if labels in right
    }


def _summed(found: Vector, kept: list[str]) -> Vector:
    total: Vector = {}
    for labels, value in found.items():
        group = frozenset(pair for pair in labels if pair[0] in kept)
        total[group] = total.get(group, 0.0) + value
    return total


def _quantile(quantile: float, buckets: Vector) -> Vector:
    """The upper bound of the bucket in which it lies; NaN where nothing was counted."""
    found: Vector = {}
    for group in {without(labels, ["le"]) for labels in buckets}:
        counts = sorted(
            (float(dict(labels)["le"]), value)
            for labels, value in buckets.items()
            if "le" in dict(labels) and without(labels, ["le"]) == group
        )
        if counts:
            total = counts[-1][1]
            inside = [bound for bound, count in counts if total and count >= quantile * total]
            found[group] = inside[0] if inside else float("nan")
    return found
