"""Calls of tools: read out of an answer that says what it is told to, by both real clients, and
their results back through the template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.serve.calls import BREAK, CLOSE, MARK, OPEN, Call, CallReader
from dsv4.serve.models import ByteTokenizer, Message, Opened, Room, StandIn
from tests.serve.serving import Running, running


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<{MARK}invoke name="{name}">', *parameters, f"</{MARK}invoke>"])


def parameter(name: str, value: str, *, text: bool) -> str:
    return f'<{MARK}parameter name="{name}" string="{str(text).lower()}">{value}</{MARK}parameter>'


def block(*invokes: str) -> str:
    return "\n".join([OPEN, *invokes, CLOSE])


OSLO = parameter("city", 'Oslo <b>\n"Ø"</b>', text=True)
DAYS = parameter("days", '{"from": 1, "to": [2, null]}', text=False)
WEATHER = Call(
    name="weather",
    arguments={"city": 'Oslo <b>\n"Ø"</b>', "days": {"from": 1, "to": [2, None]}},
)
CLOCK = Call(name="clock", arguments={})
TWO = block(invoke("weather", OSLO, DAYS), invoke("clock"))
MALFORMED = [
    block(),  # no call
    block("weather in Oslo"),
    block(invoke("weather", OSLO), "and more"),
    block(invoke("weather", OSLO, OSLO)),  # twice the same name
    block(invoke("weather", "Oslo")),
    block(invoke("weather", parameter("days", "three", text=False))),
    block(invoke("weather", parameter("days", "NaN", text=False))),
    block(invoke("weather", parameter("days", "1e999", text=False))),
    block(invoke("weather", parameter("days", '"\\ud800"', text=False))),
    block(invoke("weather", parameter("days", "[" * 100_000, text=False))),
    block(invoke("weather", parameter("days", "9" * 5_000, text=False))),
    block(invoke("weather", OSLO).replace(' string="true"', "")),
    block(invoke("weather", OSLO).replace(f"</{MARK}invoke>", "")),
    block(invoke("weather", OSLO)).removesuffix(CLOSE),  # cut short
    block(invoke("weather", OSLO))[:-1],
    OPEN.replace(MARK, "|DSML|"),
]


def read(*pieces: str) -> list[str | Call]:
    """What a reader says, texts that follow each other as one."""
    reader = CallReader()
    found = [part for piece in pieces for part in reader.push(piece)] + reader.end()
    joined = list[str | Call]()
    for part in found:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    assert reader.calls == sum(isinstance(part, Call) for part in joined)
    return joined


def test_calls_are_read_and_the_text_around_them_stays():
    assert read(TWO) == [WEATHER, CLOCK]
    assert read(f"I look.{BREAK}{TWO}") == ["I look.", WEATHER, CLOCK]
    assert read(f"I look.\n{TWO}") == ["I look.\n", WEATHER, CLOCK]
    assert read(f"a{BREAK}{TWO}b{BREAK}{TWO}") == ["a", WEATHER, CLOCK, "b", WEATHER, CLOCK]
    assert read(TWO.replace("\n<", "<")) == [WEATHER, CLOCK]  # without line breaks in between


@pytest.mark.parametrize("bad", MALFORMED)
def test_a_malformed_block_stays_text(bad: str):
    assert read(f"x{BREAK}{bad}") == [f"x{BREAK}{bad}"]
    if bad.endswith(CLOSE):
        assert read(f"x{BREAK}{bad}{BREAK}{TWO}") == [f"x{BREAK}{bad}", WEATHER, CLOCK]


def test_it_is_the_same_however_the_text_is_cut():
    draw = random.Random(3)
    parts = ["a", "\n", BREAK, "<", f"<{MARK}", TWO, *MALFORMED[:9], "é"]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=6))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 40)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(*pieces) == read(text)
        assert read(*text) == read(text)


def test_text_that_belongs_to_no_block_is_not_held_back():
    reader = CallReader()
    assert reader.push("a < b") == ["a < b"]
    assert reader.push("\n\n") == []
    assert reader.push("c") == ["\n\nc"]


# ---- a server whose model says what it is told ---------------------------------------------------


class Slices(ByteTokenizer):
    """It has also the slices of what is said as tokens; they may cut a character."""

    longest_token = 16
    vocabulary = ByteTokenizer.vocabulary + 256
    slices: Sequence[bytes] = ()

    def token_bytes(self, token: int) -> bytes:
        nth = token - ByteTokenizer.vocabulary
        return self.slices[nth] if 0 <= nth < len(self.slices) else super().token_bytes(token)


class Says:
    """A model that answers with a text after each prompt of a chat: one prompt at a time."""

    def __init__(self, inner: Any, model: Told) -> None:
        self._inner, self._model, self._said = inner, model, 0
        self.vocabulary = inner.vocabulary

    def forward(self, plan: Any, ids: Tensor, rows: Tensor) -> Tensor:
        self._inner.forward(plan, ids, rows)
        words = self._model.tokenizer
        first, count = ByteTokenizer.vocabulary, len(words.slices)
        answer, chosen = [*range(first, first + count), words.END], list[int]()
        for token in ids.tolist():
            self._said = 0 if token == words.role_token("assistant") else self._said + 1
            chosen.append(answer[min(self._said, len(answer) - 1)])
        logits = torch.zeros(len(ids), self.vocabulary)
        logits[torch.arange(len(ids)), torch.tensor(chosen)] = 50.0
        return logits[rows]

    def draft(self, plan: Any, newest: Tensor, count: int) -> Tensor:
        raise AssertionError("the server asks for no drafts")


class Told(StandIn):
    """It says what it was told, and keeps what its template was given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer: Slices = Slices()
        self.given: list[tuple[list[Message], list[Mapping[str, Any]]]] = []

    def tell(self, text: str) -> None:
        raw, width = text.encode(), self.tokenizer.longest_token
        self.tokenizer.slices = [raw[at : at + width] for at in range(0, len(raw), width)]

    def chat_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.given.append(([*messages], [*tools]))
        return super().chat_tokens(messages)

    def open(self, room: Room) -> Opened:
        opened = super().open(room)
        return Opened(model=Says(opened.model, self), manager=opened.manager)


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[Running, Told]]:
    model = Told()
    with running(model, max_requests=1) as server:
        yield server, model


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ASK = [{"role": "user", "content": "How is the weather in Oslo?"}]
CHAT: dict[str, Any] = {"model": "stand-in", "messages": ASK, "temperature": 0, "max_tokens": 99}


@pytest.mark.parametrize("before", ["", "I look."])
def test_openai_s_client_gets_calls_and_sends_results(told: tuple[Running, Told], before: str):
    server, model = told
    model.tell(f"{before}{BREAK}{TWO}")
    client = server.openai()
    found = client.chat.completions.create(**CHAT, tools=TOOLS).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content == (before or None)
    first, second = found.message.tool_calls
    assert (first.type, first.function.name) == ("function", "weather")
    assert json.loads(first.function.arguments) == WEATHER.arguments
    assert (second.function.name, second.function.arguments) == ("clock", "{}")
    assert first.id != second.id
    assert model.given[-1][1][0]["function"]["name"] == "weather"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": said}
        for call, said in ((first, "snow"), (second, "noon"))
    ]
    model.tell("It snows at noon.")
    chat = [*ASK, found.message.model_dump(exclude_none=True), *results]
    again = client.chat.completions.create(**{**CHAT, "messages": chat}, tools=TOOLS).choices[0]
    assert (again.message.content, again.finish_reason) == ("It snows at noon.", "stop")
    assert again.message.tool_calls is None
    _, said, *back = model.given[-1][0]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["weather", "clock"]
    assert back == results


def test_openai_s_client_gets_calls_in_a_stream(told: tuple[Running, Told]):
    server, model = told
    said = "I look at the sky. " * 6
    model.tell(f"{said}{BREAK}{TWO}")
    with server.openai().chat.completions.stream(**CHAT, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_completion().choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content == said
    assert [call.function.name for call in found.message.tool_calls] == ["weather", "clock"]
    assert json.loads(found.message.tool_calls[0].function.arguments) == WEATHER.arguments
    assert kinds.count("content.delta") > 3  # the text came as it was generated


def test_several_answers_have_calls_of_their_own(told: tuple[Running, Told]):
    server, model = told
    model.tell(TWO)
    asked = {**CHAT, "tools": TOOLS, "n": 2}
    found = server.openai().chat.completions.create(**asked)
    ids = {call.id for choice in found.choices for call in choice.message.tool_calls}
    assert len(ids) == 4
    chunks = [*server.openai().chat.completions.create(**asked, stream=True)]
    deltas = [choice for chunk in chunks for choice in chunk.choices if choice.delta.tool_calls]
    by_choice = [[call.index for call in choice.delta.tool_calls] for choice in deltas]
    assert sorted(by_choice) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("says", "change", "finish"),
    [
        (MALFORMED[5], {"tools": TOOLS}, "stop"),
        (TWO, {}, "stop"),  # nobody asked for calls
        (TWO, {"tools": TOOLS, "tool_choice": "none"}, "stop"),
        (TWO, {"tools": TOOLS, "max_tokens": 12}, "length"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_the_text_that_it_is(
    told: tuple[Running, Told], says: str, change: dict[str, Any], finish: str, stream: bool
):
    server, model = told
    model.tell(says)
    found = server.openai().chat.completions.create(**{**CHAT, **change}, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        text = "".join(choice.delta.content or "" for choice in choices)
        assert not any(choice.delta.tool_calls for choice in choices)
        end = choices[-1].finish_reason
    else:
        assert found.choices[0].message.tool_calls is None
        text, end = found.choices[0].message.content, found.choices[0].finish_reason
    most = 16 * change.get("max_tokens", 900)
    assert text == says.encode()[:most].decode(errors="replace")
    assert end == finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", "I look."])
def test_anthropic_s_client_gets_calls_and_sends_results(
    told: tuple[Running, Told], before: str, stream: bool
):
    server, model = told
    client = server.anthropic()
    asked: dict[str, Any] = {"model": "stand-in", "max_tokens": 900}
    asked |= {"tools": [{"name": "weather", "input_schema": SCHEMA}], "messages": ASK}
    asked |= {"extra_body": {"temperature": 0}, "tool_choice": {"type": "auto"}}

    def answer(**change: Any) -> Any:
        if not stream:
            return client.messages.create(**{**asked, **change})
        with client.messages.stream(**{**asked, **change}) as events:
            return events.get_final_message()

    model.tell(f"{before}{BREAK}{TWO}")
    found = answer()
    assert found.stop_reason == "tool_use"
    *texts, weather, clock = found.content
    assert [text.text for text in texts] == ([before] if before else [])
    assert (weather.type, weather.name, weather.input) == (
        *("tool_use", "weather"),
        WEATHER.arguments,
    )
    assert (clock.name, clock.input) == ("clock", {})
    assert weather.id != clock.id
    model.tell("It snows.")
    said = {"role": "assistant", "content": [part.model_dump() for part in found.content]}
    result = {"type": "tool_result", "tool_use_id": weather.id, "content": "snow"}
    again = answer(messages=[*ASK, said, {"role": "user", "content": [result]}])
    assert (again.stop_reason, again.content[0].text) == ("end_turn", "It snows.")
    messages, tools = model.given[-1]
    assert tools[0]["function"]["name"] == "weather"
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == WEATHER.arguments
    assert messages[2] == {"role": "tool", "tool_call_id": weather.id, "content": "snow"}
    model.tell(TWO)
    found = answer(tool_choice={"type": "none"})
    assert (found.stop_reason, found.content[0].text) == ("end_turn", TWO)
    assert model.given[-1][1] == []
    model.tell("")
    (empty,) = answer().content
    assert (empty.type, empty.text) == ("text", "")
