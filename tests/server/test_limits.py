"""A shorter context, and another chat template, as flags of the server."""

from pathlib import Path

import httpx
import pytest
from servers import settings
from talk import CHAT, Body, refused, text

from kvarve.errors import ConfigError
from kvarve.reference.server.serve import Server

HEI: Body = {"messages": [{"role": "user", "content": "hei"}], "max_tokens": 4, "temperature": 0}
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@pytest.mark.parametrize("own_server", [{"context_length": 64, "chat_template": TEMPLATE}], indirect=True)
def test_the_context_and_the_template_are_those_that_were_given(own_client: httpx.Client, song: str) -> None:
    assert own_client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
    said = own_client.post(CHAT, json=HEI).json()
    assert said["usage"]["prompt_tokens"] == len("<hei>")
    assert said["choices"][0]["message"]["content"] == text(own_client, "<hei>", max_tokens=4)
    endless = {"messages": [{"role": "user", "content": song}], "ignore_eos": True}
    assert own_client.post(CHAT, json=endless).json()["usage"]["total_tokens"] == 64, "a chat without a limit"
    for body, beginning, param in (
        ({"prompt": song * 3}, "the prompt is too long: ", "prompt"),
        ({"prompt": song, "max_tokens": 60}, "with max_tokens 60 the prompt is too long: ", "max_tokens"),
    ):
        response = own_client.post("/v1/completions", json=body)
        # LangChain and LiteLLM know an error of this kind by these words, whatever its code is.
        told = refused(response, 400)
        assert told.startswith(beginning) and told.endswith("this model's maximum context length is 64 tokens")
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_what_cannot_be_a_context_or_a_template_is_refused_at_the_start(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for given, told in (
        ({"context_length": 1025}, "context_length must be at most 1024, as the model can attend to, got 1025"),
        ({"chat_template": str(broken)}, f"chat_template must be a Jinja template, got {broken}: "),
        ({"chat_template": "chatml"}, "chat_template must be a file with a Jinja template, got chatml: "),
    ):
        with pytest.raises(ConfigError, match=told):
            Server(settings(checkpoint, **given))
