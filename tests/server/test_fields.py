"""Every field that a client of vLLM or SGLang may send is either obeyed, refused, or ignored as harmless."""

import json
import logging
from typing import Any

import httpx
import pytest
from fields_of_others import OTHERS
from talk import CHAT, COMPLETIONS, Body, cached, complete, metrics, refused

from kvarve.reference.server import fields
from kvarve.reference.server.api import ChatRequest, CompletionRequest, Message, Refused, RequestBody, parse
from kvarve.reference.server.fields import HARMLESS, INSTEAD, Ignored

EVERYWHERE = ("vllm_guided", "sglang_generate")


def named(*models: str) -> list[str]:
    return sorted({name for model in (*models, *EVERYWHERE) for name in OTHERS[model]})


THEIRS: dict[type[RequestBody], list[str]] = {
    ChatRequest: named("vllm_chat", "sglang_chat", "openai"),
    CompletionRequest: named("vllm_completion", "sglang_completion"),
}


def ask(kind: type[RequestBody], **given: Any) -> RequestBody:
    least: Body = {"messages": [{"role": "user", "content": "hei"}]} if kind is ChatRequest else {"prompt": "hei"}
    return parse(kind, json.dumps(least | given).encode())


@pytest.mark.parametrize("kind", THEIRS)
def test_every_known_field_has_one_fate(kind: type[RequestBody]) -> None:
    for name in THEIRS[kind]:
        fates = [name in kind.model_fields, name in kind.refused, name in HARMLESS]
        assert sum(fates) == 1, (name, dict(zip(("obeyed", "refused", "harmless"), fates, strict=True)))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, Message])
def test_no_list_contradicts_another(kind: Any) -> None:
    obeyed, refused_ = {*kind.model_fields}, {*kind.refused}
    assert not obeyed & refused_ and not obeyed & HARMLESS and not refused_ & HARMLESS
    assert {*INSTEAD} <= {*fields.CHAT} and {*fields.CHAT} & {*fields.COMPLETION} >= {*INSTEAD}


# A value that asks for something, where the default below would not.
ASKS: dict[str, Any] = {"function_call": {"name": "f"}, "tool_choice": "required", "modalities": ["audio"]}


@pytest.mark.parametrize("kind", THEIRS)
def test_what_would_change_an_answer_is_refused_by_its_name_unless_it_asks_for_nothing(kind: type[RequestBody]) -> None:
    for name, neutrals in kind.refused.items():
        with pytest.raises(Refused, match=f"^{name} is not supported: ") as caught:
            ask(kind, **{name: ASKS.get(name, {"asks": "for something"})})
        told = caught.value
        assert (told.status, told.param, told.code) == (400, name, "unsupported_parameter")
        for neutral in (None, *neutrals):
            assert not [*ask(kind, **{name: neutral}).unread()]
            for other in (not neutral, int(neutral)) if isinstance(neutral, bool) else ():
                with pytest.raises(Refused):
                    ask(kind, **{name: other})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens is not supported: max_tokens is its name here"),
        ({"enable_thinking": False}, "chat_template_kwargs is its name here"),
        ({"regex": "a+"}, "regex is not supported: leave it out"),
        ({"lora_path": "tenant-b"}, "lora_path is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format is not supported"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format is not supported"),
    ],
    ids=str,
)
def test_an_error_names_the_supported_field(client: httpx.Client, given: Body, told: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "hei", "max_tokens": 1} | given)
    assert told in refused(response, 400)
    assert response.json()["error"]["param"] == [*given][-1]


@pytest.mark.parametrize(
    "harmless",
    [
        {"best_of": 1, "typical_p": 1, "regex": None, "use_beam_search": False, "echo": False},
        {"typical_p": 1.0, "length_penalty": 1.0, "custom_params": {}, "ec_transfer_params": {}, "stop_regex": []},
        {"parallel_tool_calls": False, "tools": [], "session_id": "7", "priority": 3, "extra_key": ""},
        {"response_format": {"type": "text"}, "add_special_tokens": True, "watermark": {"enabled": False}},
        {"n": 1, "logprobs": None, "suffix": "", "logit_bias": {}, "frequency_penalty": 0, "top_k": -1, "min_p": 0},
        {"temperature": None, "top_p": None, "seed": None, "stop": None, "stream": None, "stream_options": None},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(client: httpx.Client, harmless: Body) -> None:
    assert complete(client, "hei", max_tokens=1, **harmless)


TOOLS = [{"type": "function", "function": {"name": "depth", "description": "", "parameters": {}}}]


def test_one_tool_call_at_a_time_is_promised_only_where_no_tool_is_offered() -> None:
    for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        assert ask(ChatRequest, parallel_tool_calls=False, **more)
    assert ask(ChatRequest, parallel_tool_calls=True, tools=TOOLS)
    for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}):
        with pytest.raises(Refused) as caught:
            ask(ChatRequest, parallel_tool_calls=False, **more)
        assert (caught.value.param, caught.value.code) == ("parallel_tool_calls", "unsupported_parameter")


@pytest.mark.parametrize(
    "given", [{"prefix": True}, {"tools": TOOLS}, {"refusal": "No."}, {"function_call": {"name": "f"}}]
)
def test_a_field_of_a_message_that_the_template_would_not_see_is_refused(client: httpx.Client, given: Body) -> None:
    asked = {"messages": [{"role": "assistant", "content": "hei"} | given], "max_tokens": 1}
    response = client.post(CHAT, json=asked)
    assert f"messages[0].{next(iter(given))} is not supported" in refused(response, 400)
    assert response.json()["error"]["param"] == "messages"


# --- tenants


def test_a_request_with_another_extra_key_hits_nothing(client: httpx.Client, song: str, salt: str) -> None:
    def found(**tenant: str) -> int:
        return sum(cached(complete(client, song * 2, max_tokens=1, **tenant)).values())

    tenants: list[dict[str, str]] = [
        {"extra_key": salt},
        {"cache_salt": salt},
        {"cache_salt": salt, "extra_key": "b"},
        {"cache_salt": json.dumps([None, salt])},
    ]
    for tenant in tenants:
        assert found(**tenant) == 0, tenant
    for tenant in tenants:
        assert found(**tenant) == 64, tenant
    assert found(cache_salt=salt, extra_key="") == 64  # "" is none, as in SGLang


def test_two_parts_of_a_salt_never_read_as_others() -> None:
    parts = ["a", "ab", "b", '"', '", "', "null", "[", None]
    seen: dict[str, tuple[Any, Any]] = {}
    for one in parts:
        for other in parts:
            salt = ask(CompletionRequest, cache_salt=one, extra_key=other).salt
            assert seen.setdefault(salt, (one, other)) == (one, other)
    assert ask(CompletionRequest).salt == ""


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_a_salt_is_short(client: httpx.Client, name: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "hei", name: "x" * 1025})
    assert "at most 1024 characters" in refused(response, 400)
    assert response.json()["error"]["param"] == name


# --- ignored fields


def test_what_is_ignored_is_counted_and_logged_once_a_name(
    own_client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    client, name = own_client, "kvarve_ignored_fields_total"
    with caplog.at_level(logging.INFO, "kvarve"):
        for _ in range(3):
            complete(client, "hei", max_tokens=1, user="me", mayonnaise=True, ketchup=None, session_id="s")
        message = {
            "role": "user",
            "content": [{"type": "text", "text": "hei", "salty": 1}, {"type": "text", "text": ""}],
        }
        assert client.post(CHAT, json={"messages": [message | {"mood": "good"}], "max_tokens": 1}).status_code == 200
    now = metrics(client)
    assert (now[f"{name}.user"], now[f"{name}.mayonnaise"], now[f"{name}.session_id"]) == (3, 3, 3)
    assert (now[f"{name}.messages.mood"], now[f"{name}.messages.content.salty"]) == (1, 1)
    assert f"{name}.ketchup" not in now
    told = [record for record in caplog.records if "is ignored" in record.getMessage()]
    assert sorted(str(record.args[0]) for record in told if record.args) == [  # type: ignore[index]
        "mayonnaise",
        "messages.content.salty",
        "messages.mood",
        "session_id",
        "user",
    ]
    levels = {str(record.args[0]): record.levelname for record in told}  # type: ignore[index]
    assert (levels["user"], levels["mayonnaise"]) == ("INFO", "WARNING")


def test_only_so_many_names_are_kept_whatever_comes(caplog: pytest.LogCaptureFixture) -> None:
    ignored = Ignored()
    with caplog.at_level(logging.INFO, "kvarve"):
        ignored.note({"user", "x" * 1000, "y" * 1000})
        for number in range(1000):
            ignored.note({f"field {number}", "user"})
        ignored.note({"priority", "field 3", "field 999"})
    counts = ignored.counts()
    assert len(counts) == Ignored.MOST_NAMES + 3  # user, priority and the others
    assert (counts["user"], counts["priority"], counts["field 3"]) == (1001, 1, 2)
    assert counts[Ignored.OTHERS] == 1 + (1000 - Ignored.MOST_NAMES) + 1
    assert len(caplog.records) == len(counts)
    assert max(len(record.getMessage()) for record in caplog.records) < 200
