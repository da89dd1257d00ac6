"""Write small traces of one conversation load in four layouts, for docs/prompt-caching.md.

    python bench/make_prompt_layouts.py FOLDER
    moestro bench kv --trace FOLDER/stable_first.jsonl --device-tokens 10m --lanes 1

20 users talk 10 turns each to an assistant. A prompt holds, in blocks of 512 tokens: instructions
and tools (16, the same for all), the user's documents (4), the conversation (2 more each turn),
and the time of day (1).
"""

import argparse
import json
from itertools import count
from pathlib import Path

USERS, TURNS = 20, 10
SYSTEM, DOCUMENTS, TURN = 16, 4, 2
BLOCK = 512


def prompts(layout: str) -> list[list[str]]:
    """What each request's blocks hold; the turns of all users are interleaved."""
    made = []
    for turn in range(TURNS):
        for user in range(USERS):
            system = [f"system {at}" for at in range(SYSTEM)]
            documents = [f"user {user} document {at}" for at in range(DOCUMENTS)]
            talk = [f"user {user} talk {at}" for at in range(TURN * (turn + 1))]
            clock = [f"time {turn} {user}"]
            parts = {
                "stable_first": [system, documents, talk, clock],
                "documents_first": [documents, system, talk, clock],
                "clock_after_system": [system, clock, documents, talk],
                "clock_first": [clock, system, documents, talk],
            }
            made.append([block for part in parts[layout] for block in part])
    return made


def main() -> None:
    """One file a layout; a block's id stands for everything up to its end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for layout in ("stable_first", "documents_first", "clock_after_system", "clock_first"):
        ids: dict[tuple[str, ...], int] = {}
        numbers = count()
        with (folder / f"{layout}.jsonl").open("w") as file:
            for at, blocks in enumerate(prompts(layout)):
                names = []
                for end in range(1, len(blocks) + 1):
                    prefix = tuple(blocks[:end])
                    if prefix not in ids:
                        ids[prefix] = next(numbers)
                    names.append(ids[prefix])
                request = {
                    "timestamp": at * 1000,
                    "input_length": BLOCK * len(blocks),
                    "output_length": 200,
                    "hash_ids": names,
                }
                file.write(json.dumps(request) + "\n")


if __name__ == "__main__":
    main()
