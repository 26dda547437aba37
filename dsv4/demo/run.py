"""The whole demo: on this library alone, then with transformers if that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4.extras import needed_by

with needed_by("the demo"):
    import torch

from dsv4.demo.alone import answer_alone
from dsv4.demo.events import DemoReport, Emit, PartResult, PrefixResult
from dsv4.demo.prompts import Prompts
from dsv4.demo_model.checkpoint import Checkpoint


def run_demo(checkpoint: Checkpoint, model: Any, emit: Emit) -> DemoReport:
    """Runs all parts and reports each step. `model` is that of `speaking_v4()`, or None where
    transformers is not installed."""
    texts, prefix = Prompts(checkpoint), None
    with _one_thread():
        parts = [answer_alone(checkpoint, texts, emit)]
        if model is not None:
            more, prefix = _with_transformers(model, texts, emit)
            parts += more
    return DemoReport(parts=parts, prefix=prefix)


def _with_transformers(
    model: Any, texts: Prompts, emit: Emit
) -> tuple[list[PartResult], PrefixResult]:
    from dsv4.demo.story import Story

    story = Story(model, texts, emit)
    story.transformers()
    story.paged()
    story.batch()
    prefix = story.prefix()
    story.restart()
    return story.parts, prefix


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are small: threads would wait for each other, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
