"""LangChain and LiteLLM talk to a kvarve server as they talk to OpenAI's."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvarve_server import serving

# They are imported by the tests, since each takes seconds, and the files of this folder are read by several processes.
if not all(map(importlib.util.find_spec, ("langchain_openai", "litellm"))):
    pytest.skip("LangChain and LiteLLM are not installed here", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)
NAME, NEW, CHUNK = "tiny", 6, 64
PROVIDERS = ["openai", pytest.param("hosted_vllm", marks=pytest.mark.long)]
# That of the model knows no tools.
TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool.function.name }}: {{ tool.function.description }}]{% endfor %}
{%- for message in messages %}{{ message.role }}
{%- if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}: {{ message.content or "nothing" }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments.at }}>{% endfor %}|
{%- endfor %}assistant:"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    words = ["--page-size", str(CHUNK), "--chunk-tokens", str(CHUNK), "--chat-template", str(template)]
    with serving(*words, "--served-model-name", NAME, "--api-key", "door") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import asks the internet for prices
        yield importlib.import_module("litellm")


@pytest.fixture
def ask(litellm: Any, url: str) -> Callable[..., Any]:
    """LiteLLM's completion."""
    same = {"model": f"openai/{NAME}", "api_base": url, "api_key": "door", "max_tokens": NEW, "temperature": 0}
    return lambda prompt, **more: litellm.completion(messages=said(prompt), num_retries=0, **(same | more))


def said(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def langchain_model(url: str, chat: bool = True, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI, OpenAI

    make = ChatOpenAI if chat else OpenAI
    same = {"base_url": url, "api_key": "door", "model": NAME, "temperature": 0, "max_tokens": NEW, "max_retries": 0}
    return make(**(same | more))


def full_chunks(tokens: int) -> int:
    return (tokens - 1) // CHUNK * CHUNK  # the last token of a prompt is always computed


def test_langchain_is_told_how_many_tokens_of_a_prompt_were_cached(url: str) -> None:
    cold, warm = (langchain_model(url).invoke("A boat went out to sea. " * 40) for _ in range(2))
    assert cold.content == warm.content and cold.response_metadata["model_name"] == NAME
    used = warm.usage_metadata
    assert used["output_tokens"] == NEW or warm.response_metadata["finish_reason"] == "stop"
    assert used["input_tokens"] > 2 * CHUNK
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    assert used["input_token_details"]["cache_read"] == full_chunks(used["input_tokens"])
    whole, *rest = langchain_model(url, stream_usage=True).stream("A boat went out to sea. " * 40)
    for piece in rest:
        whole += piece
    assert whole.content == warm.content and whole.usage_metadata == used, "a stream ends with the usage"
    assert whole.response_metadata["finish_reason"] == warm.response_metadata["finish_reason"]


def test_tools_their_calls_and_their_answers_reach_the_template_from_langchain(litellm: Any, url: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def depth(at: str) -> int:
        """How deep it is."""
        return len(at)

    asked = "How deep is it at noon? " * 20
    call = {"name": "depth", "args": {"at": "noon"}, "id": "c1"}
    messages = [HumanMessage(asked), AIMessage("", tool_calls=[call]), ToolMessage("4", tool_call_id="c1")]
    answer = langchain_model(url).bind_tools([depth]).invoke(messages)
    rendered = f"[depth: How deep it is.]user: {asked}|assistant: nothing<depth noon>|tool(c1): 4|assistant:"
    (same,) = langchain_model(url, chat=False).generate([rendered]).generations[0]
    assert answer.content == same.text
    again = litellm.text_completion(
        model=f"text-completion-openai/{NAME}", prompt=rendered, api_base=url, api_key="door", max_tokens=1
    )
    tokens = answer.usage_metadata["input_tokens"]
    assert again.usage.prompt_tokens == tokens
    assert again.usage.prompt_tokens_details.cached_tokens == full_chunks(tokens) > 0


def test_langchain_knows_the_errors_by_their_kinds(url: str) -> None:
    from langchain_core.exceptions import ContextOverflowError, ModelAuthenticationError

    for prompt, more, kind in (
        ("a " * 40_000, {}, ContextOverflowError),
        ("a", {"max_tokens": 40_000}, ContextOverflowError),
        ("a", {"api_key": "window"}, ModelAuthenticationError),
    ):
        with pytest.raises(kind):
            langchain_model(url, **more).invoke(prompt)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_reads_answers_and_streams(ask: Callable[..., Any], provider: str) -> None:
    prompt, model = f"A letter from {provider}. " * 40, f"{provider}/{NAME}"
    cold, warm = (ask(prompt, model=model) for _ in range(2))
    content, tokens = cold.choices[0].message.content, cold.usage.prompt_tokens
    assert warm.choices[0].message.content == content
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == full_chunks(tokens) > 0
    chunks = [*ask(prompt, model=model, stream=True, stream_options={"include_usage": True})]
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == content
    assert chunks[-1].usage.total_tokens == cold.usage.total_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_knows_the_errors_by_their_kinds(litellm: Any, ask: Callable[..., Any], provider: str) -> None:
    model = f"{provider}/{NAME}"
    with pytest.raises(litellm.ContextWindowExceededError):
        ask("a " * 40_000, model=model)
    for more, kind in (
        ({"max_tokens": 40_000}, litellm.ContextWindowExceededError),
        ({"model": f"{provider}/other"}, litellm.NotFoundError),
        ({"api_key": "window"}, litellm.AuthenticationError),
        ({"response_format": {"type": "json_object"}}, litellm.BadRequestError),
    ):
        with pytest.raises(kind):
            ask("a", **({"model": model} | more))
