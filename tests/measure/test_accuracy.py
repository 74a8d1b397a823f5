"""Questions with known answers: what counts as right, and which files are read."""

import json
from pathlib import Path

import pytest

from kvarve.bench.accuracy import Question, _of_file
from kvarve.bench.bench_command import Accuracy
from kvarve.errors import ConfigError

GSM8K = [
    {"question": f"What is {at} thousand and one?", "answer": f"It is so. <<x=1>>\n#### {at},001"} for at in range(1, 9)
]
MMLU = 'Which is a fruit?,"stone, or so",apple,iron,sand,B\nWhich is a metal?,stone,apple,iron,sand,C\n'


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("1,001", " 3 and 4 make 1001.", True),
        ("1,001", "1001 is what 3 make", False),
        ("-7", "so -7.0", True),
        ("B", " B. apple", True),
        ("B", " A or B", False),
        ("silver", "\nthe code of haddock is silver.\nthe code of", True),
        ("silver", "\nthe code of haddock is gold.\nsilver", False),
    ],
)
def test_what_counts_as_right(expected: str, text: str, right: bool) -> None:
    assert Question("", expected, 1).right(text) is right


def test_the_first_questions_of_a_file_are_the_examples_before_all_others(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(map(json.dumps, GSM8K)))
    found = _of_file(path, Accuracy(shots=2, output_tokens=99))
    assert [question.expected for question in found] == [f"{at},001" for at in range(3, 9)]
    example = "Question: What is 1 thousand and one?\nAnswer: It is so. <<x=1>>\n#### 1,001\n\n"
    assert all(question.prompt.startswith(example) and question.tokens == 99 for question in found)
    assert found[0].prompt.endswith("#### 2,001\n\nQuestion: What is 3 thousand and one?\nAnswer:")
    assert len(_of_file(path, Accuracy(requests=1))) == 1


def test_mmlu_s_choices_get_letters(tmp_path: Path) -> None:
    path = tmp_path / "world_facts_test.csv"
    path.write_text(MMLU)
    (found,) = _of_file(path, Accuracy(shots=1))
    assert found.prompt == (
        "The following are multiple choice questions (with answers) about world facts.\n\n"
        "Which is a fruit?\nA. stone, or so\nB. apple\nC. iron\nD. sand\nAnswer: B\n\n"
        "Which is a metal?\nA. stone\nB. apple\nC. iron\nD. sand\nAnswer:"
    )
    assert found.expected == "C"
    path.write_text("question,A,B,C,D,answer\n" + MMLU)
    assert len(_of_file(path, Accuracy(shots=0))) == 2, "a heading is no question"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"3", "line 1 needs a JSON object"),
        ("a.jsonl", b'\n{"question": "q", "answer": 3}', "line 2 needs a JSON object"),
        ("a.jsonl", b'{"question": "q", "answer": "a ####"}', "line 1: its answer must have"),
        ("a.jsonl", b"", "needs questions behind the 5 examples, got 0"),
        ("a.csv", b"q,1,2,3,4,E", "row 1 must be a question"),
        ("b.csv", None, "No such file"),
    ],
)
def test_a_file_of_another_form_is_one_error(tmp_path: Path, name: str, content: bytes | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        _of_file(tmp_path / name, Accuracy())
