"""What the log, the headers, the metrics and its usage say of each request."""

import io
import json
import logging
import re
from typing import Any

import httpx
import pytest
from talk import COMPLETIONS, complete, metrics, stream

from kvarve.reference.server.logs import JsonLines
from kvarve.reference.server.serve import Server

ID = "x-request-id"


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


def test_a_response_has_the_id_of_its_request_or_a_new_one(client: httpx.Client, song: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": song, "max_tokens": 1}, headers={ID: "ours-7"})
    assert response.headers[ID] == "ours-7" and response.json()["id"] == "cmpl-ours-7"
    assert (
        client.post(
            "/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1}}, headers={ID: "g"}
        ).json()["meta_info"]["id"]
        == "g"
    )
    for odd in ("", "a b", "x" * 129, "\xe5"):
        made = client.get("/health", headers={ID: odd.encode("latin-1")}).headers[ID]
        assert re.fullmatch("[0-9a-f]{32}", made)
    assert client.get("/nowhere", headers={ID: "lost"}).headers[ID] == "lost"
    assert client.post(COMPLETIONS, content=b"{", headers={ID: "bad"}).headers[ID] == "bad"
    assert client.get("/health").status_code == 200  # by now the lines of this test are written


def test_a_request_has_one_line_with_its_id_and_what_came_of_it_and_no_text(
    client: httpx.Client, song: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvarve"):
        client.post(
            COMPLETIONS, json={"prompt": song, "max_tokens": 3, "n": 2, "cache_salt": "a-salt"}, headers={ID: "one"}
        )
        with client.stream("POST", COMPLETIONS, json={"prompt": song, "stream": True}, headers={ID: "two"}) as response:
            response.read()
        client.post(COMPLETIONS, json={"prompt": song, "temperature": -1}, headers={ID: "three"})
        client.get("/nowhere%0Akvarve: a line of mine", headers={ID: "four"})
        client.get("/health"), client.get("/metrics")
    one, two, three, four = lines(caplog, "kvarve.reference.server.request_log")
    assert re.match(r"one: POST /v1/completions: 200 in [0-9.]+ s, 2 length, 50 prompt tokens \(.*\), 6 answered$", one)
    assert re.match(
        r"two: POST /v1/completions: 200 in [0-9.]+ s, 1 length, 50 prompt tokens \(.*\), 16 answered$", two
    )
    assert re.match(r"three: POST /v1/completions: 400 in [0-9.]+ s, code invalid_value, param temperature$", three)
    assert re.match(r"four: GET /nowhere%0Akvarve%3A%20a%20line%20of%20mine: 404 in", four)
    assert song[:5] not in caplog.text and "a-salt" not in caplog.text
    kept = [record.told() for record in caplog.records if record.name.endswith("request_log")]  # type: ignore[attr-defined]
    assert all("status" in each and "gen_ai.usage.output_tokens" not in each for each in kept), "and no request with it"


def test_a_log_of_json_has_an_object_a_line_with_the_fields_of_a_span(client: httpx.Client, song: str) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("kvarve.reference.server.request_log")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        client.post(COMPLETIONS, json={"prompt": song, "max_tokens": 3}, headers={ID: "one"})
        client.post(COMPLETIONS, json={"prompt": song * 9999}, headers={ID: "two"})
        client.get("/readyz"), client.get("/livez")
        client.get("/health")  # by now the lines before are written
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    one, two = map(json.loads, written.getvalue().splitlines())
    assert one.items() >= {"request": "one", "status": 200, "method": "POST", "path": COMPLETIONS}.items()
    assert one["gen_ai.usage.output_tokens"] == 3 and one["gen_ai.response.finish_reasons"] == ["length"]
    assert one["message"].startswith("one: POST ") and re.fullmatch(r"[-0-9]{10}T[:0-9]{8}\.[0-9]{3}Z", one["time"])
    assert two.items() >= {"status": 400, "error.code": "context_length_exceeded"}.items()
    assert song[:5] not in written.getvalue()


def test_rejections_are_counted_by_status(client: httpx.Client) -> None:
    before = metrics(client)
    assert client.post(COMPLETIONS, json={"prompt": ""}).status_code == 400
    assert client.get("/nowhere").status_code == 404
    after = metrics(client)
    for status in ("400", "404"):
        name = f"kvarve_rejected_requests_total.{status}"
        assert after[name] == before.get(name, 0) + 1


@pytest.mark.parametrize("own_server", [{"admin_key": "gate"}], indirect=True)
def test_an_operators_acts_leave_a_line_admitted_or_not(
    own_server: Server, own_client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"Authorization": "Bearer gate"}
    with caplog.at_level(logging.INFO, "kvarve"):
        own_client.put("/admin/storage", json={"url": "redis://user:secret@127.0.0.1:1"}, headers=key | {ID: "a"})
        own_client.delete("/admin/storage", headers={ID: "b"})
        own_client.post("/flush_cache", headers=key | {ID: "c"})
        own_client.get("/admin/storage", headers=key)
        complete(own_client, "hei", max_tokens=1)
        stream(own_client, COMPLETIONS, {"prompt": "hei", "max_tokens": 1})
    attach, detach, flush = lines(caplog, "kvarve.audit")
    assert attach.startswith("a: PUT /admin/storage by 127.0.0.1 with admin-key: attach 'redis://***@127.0.0.1:1': ")
    assert detach == "b: DELETE /admin/storage by 127.0.0.1: asked: 401"
    assert flush == "c: POST /flush_cache by 127.0.0.1 with admin-key: 0 pages of the device and host flushed: 200"
    assert "secret" not in caplog.text and "gate" not in caplog.text


def reasons(answer: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = answer["usage"]["kvarve"]["reasons"]
    return found


def test_an_answer_says_why_its_prompt_was_cached_or_not(client: httpx.Client, song: str, salt: str) -> None:
    body = {"prompt": song * 3, "cache_salt": salt, "max_tokens": 2}
    cold, warm = (reasons(complete(client, **body)) for _ in range(2))
    assert warm == {"hit_device": 128, "below_grid": cold["below_grid"]}
    assert cold.pop("below_grid") and sum(cold.values()) == 128 and {*cold} <= {"never_seen", "unknown"}
    client.post("/flush_cache", params={"tiers": "device"})
    assert reasons(complete(client, **body))["hit_host"] == 128
    assert reasons(complete(client, **body, skip_reading_prefix_cache=True))["not_read"] == 128
    client.post("/flush_cache", params={"tiers": "device,host"})
    last = stream(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})[-1]
    assert reasons(last)["hit_storage"] == 128
