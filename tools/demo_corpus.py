"""What tools/train_demo.py trains the demo model on: conversations made of
dsv4/data/demo_model/questions.toml, of templates and of questions that it cannot answer."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

QUESTIONS = Path(__file__).parents[1] / "dsv4" / "data" / "demo_model" / "questions.toml"

# of a term: with its article, without it, and that with a capital letter
TEMPLATES = (
    "What is {a}?",
    "What's {a}?",
    "What is {a}?",
    "What does {t} mean?",
    "What does the word {t} mean?",
    "Explain {a}.",
    "Explain {t}.",
    "Explain {a} to me.",
    "Tell me about {a}.",
    "Define {t}.",
    "Can you explain {a}?",
    "Can you explain what {a} is?",
    "I do not know what {a} is.",
    "{T}?",
    "{t}",
    "What do you mean by {t}?",
    "How would you describe {a}?",
    "Please explain what {a} is.",
    "Please tell me what {a} is.",
    "What is meant by {t}?",
    "Do you know what {a} is?",
    "What exactly is {a}?",
    "What is {a} in this cache?",
    "What is {a} in V4?",
    "And what is {a}?",
    "Now explain {a}.",
    "Give me the meaning of {t}.",
    "what is {t}",
    "Help me understand {a}.",
    "In this library, what is {a}?",
)
UNSEEN_TEMPLATES = (
    "Could you tell me what {a} is?",
    "So what is {a}?",
    "Describe {a} to me.",
    "What is the meaning of {t}?",
)

# what it cannot answer; {n} is one of THINGS
OTHER = (
    "What is a {n}?",
    "What is the {n}?",
    "What's a {n}?",
    "Explain a {n}.",
    "Tell me about the {n}.",
    "Define {n}.",
    "{n}?",
    "{n}",
    "What does {n} mean?",
    "Can you explain what a {n} is?",
    "What do you know about the {n}?",
    "Where can I buy a {n}?",
    "How much does a {n} cost?",
    "Write a poem about a {n}.",
    "Write a story about the {n}.",
    "Who invented the {n}?",
    "How do I cook a {n}?",
    "How old is the {n}?",
    "What colour is the {n}?",
    "Do you like the {n}?",
    "Why is the {n} blue?",
    "Draw a {n}.",
    "Translate {n} into French.",
    "How many {n}s are there in the world?",
    "When was the first {n} made?",
    "Please tell me a joke about a {n}.",
    "What is the best {n}?",
    "Is the {n} larger than the {m}?",
    "What is the difference between a {n} and a {m}?",
    "Give me a recipe with {n} and {m}.",
)
UNSEEN_OTHER = ("Could you tell me what a {n} is?", "Where does the {n} come from?")
_THINGS = """
banana guitar river mountain president king queen football weather car bicycle house dog cat
horse elephant piano violin city country capital France Germany China moon sun planet star ocean
fish bread cheese pizza coffee tea wine computer phone book film song dance war peace money bank
stock doctor teacher school university language word poem painting museum church bridge train
ship aeroplane rocket engineer lawyer flower tree forest garden chair lamp window cleaner
kitchen knife spoon number prime triangle integral atom molecule virus bacteria heart brain
dream love hate friend family holiday birthday letter email website shirt shoe hat watch clock
year month week yesterday tomorrow python snake java rust compiler linker kernel driver database
router socket printer keyboard mouse screen camera game chess poker
"""
THINGS = tuple(_THINGS.split())
_UNSEEN_THINGS = """
apple trumpet desert emperor tennis storm lorry castle wolf butter
"""
UNSEEN_THINGS = tuple(_UNSEEN_THINGS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """An answer and the questions that it answers."""

    text: str
    asked: tuple[str, ...]
    unseen: tuple[str, ...]


def load_topics() -> tuple[list[Topic], str]:
    """All topics, and what is said to anything else."""
    found = tomllib.loads(QUESTIONS.read_text("utf-8"))
    topics = [Topic(text=found["hello"], asked=tuple(found["greetings"]), unseen=())]
    for each in found["answer"]:
        asked, unseen = list(each.get("ask", ())), list(each.get("unseen", ()))
        if "term" in each:
            asked += [_filled(template, each["term"]) for template in TEMPLATES]
            unseen += [_filled(template, each["term"]) for template in UNSEEN_TEMPLATES]
        topics.append(Topic(text=each["text"], asked=tuple(asked), unseen=tuple(unseen)))
    return topics, found["otherwise"]


def _filled(template: str, term: str) -> str:
    bare = term
    for article in ("a ", "an ", "the "):
        bare = bare.removeprefix(article)
    return template.format(a=term, t=bare, T=bare[0].upper() + bare[1:])


class Speaker:
    """Makes questions and their answers, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.topics, self.otherwise = load_topics()

    def turn(self) -> tuple[str, str]:
        chosen = self._random
        if chosen.random() < 0.12:
            return self._worn(self.other()), self.otherwise
        topic = chosen.choice(self.topics)
        return self._worn(chosen.choice(topic.asked)), topic.text

    def system(self) -> str | None:
        """Now and then there is a system message, which changes nothing."""
        if self._random.random() > 0.1:
            return None
        return self._random.choice(
            (
                "You are a helpful assistant.",
                "Answer briefly.",
                "You answer questions about the cache.",
                "You are dsv4.",
                "Be polite and answer in English.",
            )
        )

    def other(self) -> str:
        chosen = self._random
        if chosen.random() < 0.1:
            letters = "abcdefghijklmnopqrstuvwxyz      0123456789?!.,"
            return "".join(chosen.choice(letters) for _ in range(chosen.randint(1, 30)))
        thing, another = chosen.sample(THINGS, 2)
        return chosen.choice(OTHER).format(n=thing, m=another)

    def _worn(self, question: str) -> str:
        """As people type: without capitals, without the mark, with a slip."""
        chosen = self._random
        if chosen.random() < 0.15:
            question = question.lower()
        if chosen.random() < 0.2:
            question = question.rstrip("?.!")
        if chosen.random() < 0.08:
            at = chosen.randrange(len(question) + 1)
            slip = chosen.choice(("", question[at : at + 1] * 2))
            question = question[:at] + slip + question[at + 1 :]
        if chosen.random() < 0.03:
            question += " " + chosen.choice(("Please.", "Thanks!", "I wonder."))
        return question or "?"
