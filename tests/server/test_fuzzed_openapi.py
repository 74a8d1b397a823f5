"""The server keeps to what its OpenAPI document says: requests that follow it are answered as it says, and others too.

The short form has the same requests in each run. The long one (`make test-fuzzed`) goes on for ten minutes, with
another seed each time, which it prints; KVARVE_SEED repeats one, KVARVE_MINUTES says how long.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from left import Left, rss_bytes
from schemathesis.checks import load_all_checks
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from servers import settings as server_settings

from kvarve.reference.server.serve import Server

ADMIN = "an-admin-key"


def no_bug(ctx: Any, response: Any, case: Any) -> None:
    """A 503 is none if its headers say when to ask again: the engine is full or late."""
    again = response.status_code == 503 and "retry-after" in response.headers
    assert response.status_code < 500 or again, response.text[:2000]


CHECKS = [
    no_bug,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    negative_data_rejection,
]
EXAMPLES = 4  # of each operation and kind of data in the short form
LONG_EXAMPLES = 100  # in each round of the long one
MINUTES, SEED = float(os.environ.get("KVARVE_MINUTES", "10")), os.environ.get("KVARVE_SEED")
WARM_S = 60.0
LONG = [pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 600)]


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Iterator[Server]:
    """With a small context, since requests may ask for as many tokens as there are."""
    with Server(server_settings(checkpoint, tmp_path, context_length=96, admin_key=ADMIN)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@dataclass
class Asking:
    """Sends an operation's requests, and checks the answers."""

    document: dict[str, Any]
    url: str
    got: Counter[int] = field(default_factory=Counter)

    def schema(self) -> Any:
        load_all_checks()
        project = ProjectConfig(
            generation=GenerationConfig(database="none", with_security_parameters=False), base_url=self.url
        )
        return schemathesis.openapi.from_dict(
            self.document, config=SchemathesisConfig(projects=ProjectsConfig(default=project))
        )

    def all(self, examples: int, number: int | None, end_s: float = float("inf")) -> None:
        """`number`: the seed, None for the same requests in each run."""
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {ADMIN}"
            for result in self.schema().get_all_operations():
                operation = result.ok()
                if operation.method == "put" and "storage" in operation.path:
                    continue  # a URL of a storage is a folder of this machine
                # Any text is a model's name, so nothing else can be wrong.
                takes = operation.body or operation.query
                for mode in GenerationMode if takes else [GenerationMode.POSITIVE]:
                    if time.monotonic() < end_s:
                        self._one(operation, mode, examples, number, session)

    def _one(
        self, operation: Any, mode: GenerationMode, examples: int, number: int | None, session: requests.Session
    ) -> None:
        @settings(
            max_examples=examples,
            derandomize=number is None,
            database=None,
            deadline=None,
            suppress_health_check=[*HealthCheck],
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(mode))
        def ask(case: Any) -> None:
            if (
                mode is GenerationMode.POSITIVE
                and isinstance(case.body, dict)
                and isinstance(case.body.get("model"), str)
            ):
                case.body["model"] = "singer"
            response = case.call(session=session)
            self.got[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        print(operation.label, mode.value, flush=True)
        (ask if number is None else seed(number)(ask))()


@pytest.fixture
def asking(client: httpx.Client, server: Server) -> Asking:
    return Asking(client.get("/openapi.json").json(), server.url)


def test_every_answer_is_one_that_the_document_says(asking: Asking, server: Server, client: httpx.Client) -> None:
    left = Left(server, client)
    asking.all(EXAMPLES, None)
    print(asking.got)
    assert asking.got[200] and asking.got[400]
    left.check(asking.got)


@pytest.mark.long
def test_a_stream_is_the_events_that_the_document_says(asking: Asking) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "hei", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hei"}], "max_tokens": 3}),
        ("/generate", {"text": ["hei", "hvarv"], "sampling_params": {"max_new_tokens": 3}}),
    ):
        case = asking.schema()[path]["POST"].Case(body=body | {"stream": True}, media_type="application/json")
        response = case.call_and_validate(checks=CHECKS)
        assert response.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize("minutes", [pytest.param(MINUTES, marks=LONG)])
def test_for_ten_minutes_every_answer_is_one_that_the_document_says(
    asking: Asking, server: Server, client: httpx.Client, minutes: float
) -> None:
    number = int(SEED) if SEED else time.time_ns() % (1 << 32)
    print(f"KVARVE_SEED={number} KVARVE_MINUTES={minutes:g}", flush=True)
    dice, end_s = random.Random(number), time.monotonic() + 60 * minutes
    asking.all(LONG_EXAMPLES, dice.randrange(1 << 32), min(end_s, time.monotonic() + WARM_S))
    left, before = Left(server, client), rss_bytes()
    asking.got.clear()
    while time.monotonic() < end_s:
        asking.all(LONG_EXAMPLES, dice.randrange(1 << 32), end_s)
    print(asking.got)
    left.check(asking.got, rss_bytes_before=before)
