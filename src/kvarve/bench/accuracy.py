"""Does a model answer as well through the cache? Questions with known answers, asked in rounds around a flush.

Files of GSM8K's form (`question`, `answer` with #### before what counts) and of MMLU's (question, four choices, the
letter); the first questions of each are the examples before all others, so all share a prefix. Without files: facts
from a text, such as builtin:tiny-hybrid has learned to find.
"""

import asyncio
import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarve.bench.bench_command import Accuracy
from kvarve.bench.load import Record, Round, check, connected
from kvarve.bench.run import compared, in_rounds, shown, target
from kvarve.bench.workloads import Conversation, Turn
from kvarve.errors import ConfigError
from kvarve.reference.engine.recall import recall_task
from kvarve.reports import Printer, plain_table

FILE_BYTES = 256 << 20
SHOTS = 5
OWN = "kvarve's own"
TASKS, PER_TASK, TASK_TOKENS, FACTS = 6, 4, 700, 16
OWN_TOKENS, LETTER_TOKENS = 16, 3
STOP = ("Question:", "\n\n\n")
LETTERS = "ABCD"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer that counts: a number, a letter of a choice, or a word."""

    prompt: str
    expected: str
    tokens: int
    """most of its answer"""

    def right(self, text: str) -> bool:
        """Of a number the last one in the text counts; of a letter the first; of a word the first line that is not
        empty has to have it."""
        if (wanted := _number(self.expected)) is not None:
            found = _NUMBER.findall(text)
            return bool(found) and _number(found[-1]) == wanted
        if self.expected in LETTERS:
            return text.strip()[:1].upper() == self.expected
        line = next((line for line in text.splitlines() if line.strip()), "")
        return self.expected.casefold() in (word.strip(".,!?;:\"'").casefold() for word in line.split())


def main(options: Accuracy) -> int:
    """0 if all questions got the same answer in all rounds, right or wrong; else 1."""
    printer = Printer(options.json)
    sets = {str(path): _of_file(path, options) for path in options.input} or {OWN: own(options)}
    questions = [question for found in sets.values() for question in found]
    asked = [Conversation((Turn(question.prompt, question.tokens),)) for question in questions]
    with target(options, "--deterministic") as url:
        rounds = asyncio.run(_rounds(url, options, asked))
    report, same = [], True
    table = plain_table("questions of", right=["number", *(each.name for each in rounds), "answers differ"])
    at = 0
    for name, found in sets.items():
        part = slice(at, at := at + len(found))
        rights = [_right(found, each.records[part]) for each in rounds]
        differ = _differ([each.records[part] for each in rounds])
        same = same and not differ
        table.add_row(name[-40:], f"{len(found):,}", *(f"{one / len(found):.1%}" for one in rights), f"{differ:,}")
        report.append({"input": name, "questions": len(found), "right": rights, "answers_differ": differ})
    printer.table(table)
    rows = compared(rounds)
    for row in rows:
        cached = ", ".join(f"{count:,} from {tier}" for tier, count in row["cached_tokens"].items() if count)
        printer.say(f"{row['round']}: {row['prompt_tokens']:,} prompt tokens, {cached or 'none cached'}")
    if not same:
        printer.say(
            "The answers differ between rounds. A server that batches requests may round differently each time."
        )
    return printer.write(
        {"bench": "accuracy", "options": shown(options), "sets": report, "rounds": rows}, int(not same)
    )


async def _rounds(url: str, options: Accuracy, asked: Sequence[Conversation]) -> list[Round]:
    async with connected(url, options) as client:
        rounds = await in_rounds(client, options, asked, options.clients, stop=STOP)
        check(record for each in rounds for record in each.records)
        return rounds


def _right(questions: Sequence[Question], records: Sequence[Record]) -> int:
    return sum(question.right(record.text) for question, record in zip(questions, records, strict=True))


def _differ(rounds: Sequence[Sequence[Record]]) -> int:
    """How many questions did not get the same answer in all rounds."""
    return sum(len({record.text for record in answers}) > 1 for answers in zip(*rounds, strict=True))


def own(options: Accuracy) -> list[Question]:
    """Questions about facts in texts; several about each text."""
    tasks = [recall_task(seed, tokens=TASK_TOKENS, facts=FACTS, questions=PER_TASK) for seed in range(TASKS)]
    found = [
        Question(f"Question: {task.context}{each.chat}\nAnswer: {each.plain}", each.answer, OWN_TOKENS)
        for task in tasks
        for each in task.questions
    ]
    return found[: options.requests]


def _of_file(path: Path, options: Accuracy) -> list[Question]:
    """ConfigError: it has neither form, or no question behind its examples."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise ConfigError(f"--input: {path} must have at most {FILE_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--input: {path}: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--input: {path} must be UTF-8") from None
    if path.suffix == ".csv":
        known, head, tokens = mmlu(path, text), _subject(path), LETTER_TOKENS
    else:
        known, head, tokens = gsm8k(path, text), "", options.output_tokens
    shots = SHOTS if options.shots is None else options.shots
    if len(known) <= shots:
        raise ConfigError(f"--input: {path} needs questions behind the {shots} examples, got {len(known)} in all")
    head += "".join(f"{question} {answer}\n\n" for question, answer, _ in known[:shots])
    asked = known[shots:][: options.requests]
    return [Question(head + question, expected, tokens) for question, _, expected in asked]


def gsm8k(path: Path, text: str) -> list[tuple[str, str, str]]:
    """By line: the question as it is asked, its answer as an example gives it, and what of it counts."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        question, answer = (row.get("question"), row.get("answer")) if isinstance(row, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ConfigError(f"--input: {path}, line {number} needs a JSON object with texts `question` and `answer`")
        counts = answer.rpartition("####")[2].strip()
        if not counts:
            raise ConfigError(f"--input: {path}, line {number}: its answer must have a text behind ####")
        found.append((f"Question: {question}\nAnswer:", answer, counts))
    return found


def mmlu(path: Path, text: str) -> list[tuple[str, str, str]]:
    """The same of a file of choices; a heading is left out."""
    found = []
    try:
        rows = [*csv.reader(text.splitlines(keepends=True), strict=True)]
    except csv.Error as e:
        raise ConfigError(f"--input: {path}: no CSV: {e}") from None
    for number, row in enumerate(rows, 1):
        if not row or (number == 1 and row[-1].strip().lower() == "answer"):
            continue
        if len(row) != 6 or row[5].strip() not in (*LETTERS,):
            raise ConfigError(f"--input: {path}, row {number} must be a question, four choices and one of A, B, C, D")
        choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:5], strict=True))
        letter = row[5].strip()
        found.append((f"{row[0]}{choices}\nAnswer:", letter, letter))
    return found


def _subject(path: Path) -> str:
    subject = re.sub(r"_(test|dev|val)$", "", path.stem).replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {subject}.\n\n"


def _number(text: str) -> float | None:
    plain = text.replace(",", "").replace("$", "")
    return float(plain) if _NUMBER.fullmatch(plain) else None
