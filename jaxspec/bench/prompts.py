"""Benchmark prompts: a built-in set of mixed kinds and lengths, or a JSONL file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.sched.sim import json_lines

PROMPTS: tuple[str, ...] = (
    # Questions with short answers.
    "What is the capital of Portugal?",
    "How many minutes are there in a day?",
    "Which planet has the most moons?",
    "Is glass a solid or a liquid? Answer in one sentence.",
    "Who wrote Don Quixote, and when?",
    "What does the abbreviation RAM stand for?",
    # Explanations.
    "Why is the sky blue but the sunset red?",
    "Explain how a bicycle stays upright while it is moving.",
    "What happens inside a seed when it begins to grow?",
    "Explain to a ten-year-old what a computer virus is.",
    "How does a refrigerator make things cold if it only moves heat around?",
    "Compare tea and coffee as a morning drink: taste, caffeine, cost and habit.",
    # Lists and plans.
    "List seven things to check before a long drive in winter.",
    "Give me a packing list for three days of hiking with one night in a tent.",
    "Suggest a week of simple dinners for two people who don't eat meat. Name one dish a day and its three main"
    " ingredients.",
    "Plan a birthday party for eight children aged six in a small flat on a rainy day. Give the order of events with"
    " times, and keep it under two hours.",
    # Stories, poems, letters.
    "Write a short story about a lighthouse keeper who finds a message in a bottle that he wrote himself.",
    "Write a poem of four lines about the first snow.",
    "Write a polite letter to a neighbour whose dog barks every night between two and three.",
    "Continue this story: The lift stopped between the ninth and the tenth floor, and when the lights came back there"
    " was one passenger more than before.",
    # Sums.
    "A shop sells pencils at 12 for 3 euros. How much do 20 pencils cost? Show the steps.",
    "A tank holds 240 litres. One tap fills it in 40 minutes, a second one in one hour. How long do both need?",
    "Mia is three times as old as her brother. In six years she will be twice as old as he is. How old are they now?",
    # Code.
    "Write a Python function that tells whether a string reads the same backwards, ignoring case and spaces.",
    "What does this line do? Write it more clearly.\n\nresult = [x for xs in rows for x in xs if x % 2]",
    "Write an SQL query that finds the three customers with the highest total of orders in 2024. The tables are"
    " customers(id, name) and orders(id, customer_id, placed_on, total).",
    "This function should return the largest value of a list but fails for negative numbers. Find the mistake and"
    " correct it.\n\ndef largest(values):\n    best = 0\n    for value in values:\n        if value > best:\n"
    "            best = value\n    return best",
    # Work on a given text.
    "Turn this into three short bullet points: The library will be closed from Monday to Wednesday while the heating is"
    " replaced. Books due in that time can be returned until Friday without a fee, and the reading room on Mill Street"
    " stays open in the afternoons.",
    "Make this sentence friendlier: You have not sent the form, so nothing can be done.",
    "Summarise in two sentences: When the river was straightened in the last century, ships could pass all year round"
    " and the meadows beside it became fields. But the water, which had wandered for weeks through bends and side arms,"
    " now reached the city in three days, and each heavy rain brought a flood where there had been none. Forty years"
    " later the city bought the fields back, opened two of the old arms and let the reeds grow. The ships still pass;"
    " the floods have become rare; and in spring the herons are back.",
    "Say what the writer feels, and which words show it: I have walked down this street every day for eleven years, and"
    " this morning I noticed for the first time that the baker's sign has a small moon painted on its back, where only"
    " the people leaving can see it.",
    "You are helping a small museum. Here is what a visitor wrote: 'The rooms were lovely and the guard by the door was"
    " very kind to my mother, who walks slowly. But we looked for the old maps for half an hour, nobody could tell us"
    " that they were away for repair, and the audio guide stopped at every second station. We would come back, if only"
    " someone told us before when the maps are there again.' Write an answer of about 120 words which thanks for the"
    " praise, excuses what went wrong, and says that the maps return in the first week of May.",
)

#: Approximate words per token of English text, to make prompts of a given number of tokens without a tokenizer.
WORDS_PER_TOKEN = 0.75


def words(tokens: int) -> int:
    """Approximate number of words in `tokens` tokens."""
    return max(1, round(tokens * WORDS_PER_TOKEN))


def load(path: str | Path) -> list[str]:
    """The first text of `turns` of each line of a JSONL file. Raises OSError or ValueError, which names the line."""
    texts = json_lines.read(path, first_turn)
    if not texts:
        raise ValueError(f"{path}: no prompts")
    return texts


def first_turn(row: Any) -> str:
    """The prompt of a row. Raises LookupError, TypeError or ValueError."""
    text = row["turns"][0]
    if not isinstance(text, str) or not text:
        raise ValueError("the first entry of 'turns' is empty or not a text")
    return text


def mixed(kinds: Sequence[Sequence[str]]) -> list[str]:
    """The texts of all kinds interleaved, each kind cut to the length of the shortest."""
    return [text for row in zip(*kinds, strict=False) for text in row]


def choose(texts: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """`count` of `texts` in random order; every text is used once before any is repeated."""
    picked: list[str] = []
    while len(picked) < count:
        picked += [texts[int(i)] for i in rng.permutation(len(texts))[: count - len(picked)]]
    return picked


def of_words(texts: Sequence[str], count: int, start: int) -> str:
    """A text of `count` words: the words of `texts` from `texts[start]` on, cyclically."""
    rotated = [texts[(start + i) % len(texts)] for i in range(len(texts))]
    return " ".join(islice(cycle(word for text in rotated for word in text.split()), count))


def of_tokens(ids: Sequence[Sequence[int]], count: int, start: int) -> list[int]:
    """Exactly `count` token ids: those of the tokenised texts `ids` from `ids[start]` on, cyclically."""
    rotated = [ids[(start + i) % len(ids)] for i in range(len(ids))]
    return list(islice(cycle(token for text in rotated for token in text), count))
