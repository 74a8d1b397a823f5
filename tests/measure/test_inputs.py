"""What is asked: the same in every round, and of the shape that was ordered."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvarve.bench import workloads
from kvarve.bench.bench_command import LongDocument, Multiturn, Serving, SharedPrefix
from kvarve.bench.workloads import Conversation
from kvarve.errors import ConfigError


def prompts(conversations: list[Conversation]) -> list[list[int]]:
    found = [turn.prompt for conversation in conversations for turn in conversation.turns]
    assert all(isinstance(prompt, list) for prompt in found)
    return found  # type: ignore[return-value]


def shared(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_the_seed_decides_every_prompt() -> None:
    def made(seed: int) -> list[Any]:
        return [
            workloads.serving(Serving(seed=seed, requests=3)),
            workloads.multiturn(Multiturn(seed=seed)),
            workloads.shared_prefix(SharedPrefix(seed=seed)),
            workloads.long_document(LongDocument(seed=seed)),
        ]

    assert made(1) == made(1)
    assert all(one != two for one, two in zip(made(1), made(2), strict=True))


def test_a_turn_begins_with_all_turns_before_it_and_a_place_for_the_answer() -> None:
    conversations = workloads.multiturn(Multiturn(clients=2, turns=3, input_tokens=100, output_tokens=10))
    assert len(conversations) == 2
    for conversation in conversations:
        one, two, three = prompts([conversation])
        assert [len(one), len(two), len(three)] == [100, 210, 320]
        assert two[:100] == one and three[:210] == two
    first, other = (prompts([conversation])[0] for conversation in conversations)
    assert shared(first, other) < 16, "conversations share nothing"


def test_prompts_of_a_group_share_its_prefix_and_no_more() -> None:
    options = SharedPrefix(groups=3, prompts=4, prefix_tokens=200, input_tokens=20)
    made = prompts(workloads.shared_prefix(options))
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in made:
        groups.setdefault(tuple(prompt[:200]), []).append(prompt)
    assert sorted(map(len, groups.values())) == [4, 4, 4] and {len(prompt) for prompt in made} == {220}
    assert all(shared(one, two) < 210 for group in groups.values() for one in group for two in group if one is not two)


def test_each_document_gets_its_first_question_before_any_gets_its_second() -> None:
    made = prompts(workloads.long_document(LongDocument(documents=3, questions=2, document_tokens=300, input_tokens=9)))
    assert [shared(made[at], made[at + 3]) // 300 for at in range(3)] == [1, 1, 1]
    assert shared(made[0], made[1]) < 16 and {len(prompt) for prompt in made} == {309}


def test_a_trace_s_prompts_share_what_its_ids_share(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 70, "output_length": 500, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 64, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 4000, "input_length": 40, "output_length": 0, "hash_ids": [5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = Serving(input=str(path), block_tokens=32, speed=2.0, output_tokens=100)
    made = workloads.serving(options)
    one, two, three = prompts(made)
    assert [len(one), len(two), len(three)] == [70, 64, 40]
    assert shared(one, two) == 64 and shared(one, three) < 16
    assert [conversation.at_s for conversation in made] == [0.0, 1.0, 1.5]
    assert [conversation.turns[0].output_tokens for conversation in made] == [100, 3, 100]
    assert workloads.serving(options) == made
    assert len(workloads.serving(Serving(input=str(path), block_tokens=32, requests=2))) == 2


SHAREGPT = [
    {"conversations": [{"from": "gpt", "value": "Welcome."}, {"from": "human", "value": "one?"}]
     + [{"from": "gpt", "value": "x" * 40}, {"from": "human", "value": "two?"}, {"from": "gpt", "value": "y" * 4000}]},
    {"conversations": [{"from": "gpt", "value": "only an answer"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
     + [{"role": "assistant", "content": "a"}]},
]  # fmt: skip


def test_sharegpt_s_answers_stand_in_later_prompts(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(SHAREGPT))
    talk, short = [each.turns for each in workloads.sharegpt(path, 256)]
    assert [turn.output_tokens for turn in talk] == [10, 256], "a quarter of its bytes, and no more than asked for"
    assert talk[0].prompt == [{"role": "user", "content": "one?"}]
    assert talk[1].prompt == [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "x" * 40},
        {"role": "user", "content": "two?"},
    ]
    assert [message["role"] for message in short[0].prompt] == ["system", "user"]  # type: ignore[index]
    assert [len(each.turns) for each in workloads.serving(Serving(input=str(path)))] == [1, 1]
    assert [len(each.turns) for each in workloads.multiturn(Multiturn(input=str(path)))] == [2]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[", "must be JSON"),
        ("[3]", "must be a list of JSON objects"),
        ('[{"conversations": 3}]', "must have a list of `conversations`"),
        ('[{"conversations": [{"from": 3, "value": "a"}]}]', "must have `from` and `value`"),
        ('{"timestamp": 1}', "line 1"),
        ("", "must hold requests, and has none"),
    ],
)
def test_a_file_of_another_form_is_one_error(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "input.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        workloads.serving(Serving(input=str(path)))
