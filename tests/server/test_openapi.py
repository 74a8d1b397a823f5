"""The document at /openapi.json is true of paths, keys and bodies. `test_fuzzed_openapi.py` asks what it says."""

import json
from typing import Any

import httpx
import pytest
from talk import Body, refused

from kvarve.reference.engine.requests import BOUNDS
from kvarve.reference.server import fields
from kvarve.reference.server.serve import Server

API, ADMIN = "an-api-key", "an-admin-key"
KEYS = {"api_key": API, "admin_key": ADMIN}
OPEN = {"/health", "/readyz", "/livez", "/health_generate", "/metrics", "/version"}
GUARDED = {"/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
GUARDED |= {"/generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info"}
FLUSHES = {"/flush_cache", "/reset_prefix_cache"}
OPERATORS = {"/admin/storage", "/hicache/storage-backend", "/hicache/storage-backend/clear"}


def document(client: httpx.Client) -> Body:
    response = client.get("/openapi.json")
    assert response.status_code == 200, response.text
    return dict(response.json())


def operations(told: Body) -> list[tuple[str, str, Body]]:
    """(path, method, what is said) of each operation, with a name in the place of a path's parameter."""
    return [
        (path.replace("{model}", "singer"), method, said)
        for path, methods in told["paths"].items()
        for method, said in methods.items()
    ]


def test_it_has_every_endpoint_that_is_no_page(client: httpx.Client) -> None:
    told = document(client)
    assert told["openapi"].startswith("3.1") and told["info"]["title"] == "kvarve"
    assert {*told["paths"]} == OPEN | GUARDED | FLUSHES | OPERATORS


def test_a_method_that_it_has_not_gets_405_in_the_form_of_errors(client: httpx.Client) -> None:
    for path, methods in document(client)["paths"].items():
        for method in {"post", "put", "delete", "patch"} - {*methods}:
            message = refused(client.request(method, path.replace("{model}", "singer")), 405)
            assert message.endswith("Method Not Allowed")
    for path in ("/v1/nothing", "/v1/completions/"):  # no redirect, which would name a scheme and a host
        assert path in refused(client.post(path), 404)


@pytest.mark.parametrize("own_server", [KEYS], indirect=True)
def test_what_needs_a_key_says_so_and_gets_401_without(own_server: Server, own_client: httpx.Client) -> None:
    told = document(own_client)
    assert not [word for word in (API, ADMIN, "singer", str(own_server.settings.model)) if word in json.dumps(told)]
    for path, method, said in operations(told):
        answer = own_client.request(method, path, json={} if method in ("post", "put") else None)
        assert (answer.status_code == 401) == ("security" in said), (path, method)
        assert ("401" in said["responses"]) == ("security" in said)
        if "security" in said:
            refused(answer, 401)
            admin = own_client.request(method, path, headers={"Authorization": f"Bearer {API}"}, json={})
            assert (admin.status_code == 401) == ("admin_key" in said["security"][0]), (path, method)


def test_without_keys_it_asks_for_none_but_the_operators(client: httpx.Client) -> None:
    asking = {path for path, _, said in operations(document(client)) if "security" in said}
    assert asking == OPERATORS


def test_a_body_has_the_fields_that_are_refused_with_what_asks_for_nothing(client: httpx.Client) -> None:
    schemas = document(client)["components"]["schemas"]
    for kind, refusing in (
        ("CompletionRequest", fields.COMPLETION),
        ("ChatRequest", fields.CHAT),
        ("GenerateRequest", fields.GENERATE),
        ("SamplingParams", fields.SAMPLING_PARAMS),
    ):
        for name, neutral in refusing.items():
            said: Any = schemas[kind]["properties"][name]
            assert said == {"enum": [None, *map(_as_json, neutral)]}, (kind, name)


def test_the_bounds_of_a_number_are_those_that_are_kept(client: httpx.Client) -> None:
    schema = document(client)["components"]["schemas"]["CompletionRequest"]["properties"]
    for name in BOUNDS:
        number, null = schema[name]["anyOf"]
        assert null == {"type": "null"}
        least, most = number["minimum"], number["maximum"]
        for value, status in ((least, 200), (most, 200), (least - 0.005, 400), (most + 0.005, 400)):
            asked = client.post("/v1/completions", json={"prompt": "hei", "max_tokens": 1, name: value})
            assert asked.status_code == status and (status == 200 or name in refused(asked, 400))


def _as_json(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value
