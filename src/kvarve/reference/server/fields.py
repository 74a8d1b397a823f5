"""Request fields that `api` does not implement: each is refused, or ignored as harmless.

A field is refused if ignoring it would change the content or form of the answer, unless its value is a no-op; null
always is. A field is ignored if it only identifies the client, says where or when to compute, or concerns logging. A
name in no list here is ignored too; `Ignored` counts and logs it.

The names are those of the request models of vLLM 0.32.0 (`ChatCompletionRequest` and `CompletionRequest` below
`vllm/entrypoints/openai`) and SGLang 0.5.23 (the same two in `sglang/srt/entrypoints/openai/protocol.py`, then
`GenerateReqInput` and `SamplingParams`, whose fields its users send here by mistake), of OpenAI's API reference, and of
sampling fields of other servers. `tests/server/test_fields.py` has copies of the lists; each name is in one list.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

Neutral = dict[str, tuple[Any, ...]]  # by name: the no-op values, beside null

# --- refused, unless the value is one of these


def _all(names: str, *neutral: Any) -> Neutral:
    return dict.fromkeys(names.split(), neutral)


_CONSTRAINED: Neutral = {  # constrained output
    **_all("guided_json allowed_token_ids thinking_token_budget max_thinking_tokens"),
    **_all("guided_regex guided_grammar json_schema regex ebnf structural_tag grammar", ""),
    **_all("guided_choice bad_words", []),
    **_all("structured_outputs", {}),
    "response_format": ({"type": "text"},),
}
_SAMPLED: Neutral = {  # sampling
    **_all("beam_width num_beams length_penalty typical_p typical tfs tfs_z", 1),
    **_all("epsilon_cutoff eta_cutoff top_a mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range", 0),
    **_all("no_repeat_ngram_size", 0),
    **_all("use_beam_search watermarking", False),
    **_all("do_sample", True),
    **_all("custom_logit_processor lora_path", ""),
    **_all("logits_processors", []),
    **_all("custom_params vllm_xargs sampling_params extra_body", {}),
    "watermark": ({}, {"enabled": False}),
}
_ENDED: Neutral = {  # stop conditions and trimming
    **_all("max_new_tokens max_length n_predict repetition_detection"),
    **_all("min_new_tokens", 0),
    **_all("no_stop_trim include_stop_str_in_output", False),
    **_all("skip_special_tokens spaces_between_special_tokens", True),
    "stop_regex": ("", []),
}
_PROMPTED: Neutral = {  # the prompt
    **_all("truncate_prompt_tokens truncate text chat_template reasoning_effort enable_thinking thinking task"),
    **_all("web_search_options"),
    **_all("suffix", ""),
    **_all("prompt_embeds input_ids input_embeds documents functions image_data video_data audio_data", []),
    **_all("session_params reasoning", {}),
    **_all("add_generation_prompt", True),
    **_all("continue_final_message", False),
    **_all("function_call", "none", "auto"),
}
_RETURNED: Neutral = {  # further content of the answer
    **_all("verbosity audio prompt_logprobs sampling_logprobs_mode"),
    **_all("include_reasoning", True),
    **_all("modalities", ["text"]),
    **_all("logprob_token_ids token_ids_logprob", []),
    **_all("logprob_start_len", -1),
    **_all("top_logprobs_num", 0),
    **_all("ec_transfer_params", {}),
    **_all("return_logprob return_text_in_logprobs return_tokens_as_token_ids return_token_ids", False),
    **_all("return_prompt_token_ids return_input_ids_in_sglext return_output_ids_in_sglext", False),
    **_all("return_prompt_text return_hidden_states return_routed_experts return_indexer_topk", False),
    **_all("return_spec_tokens_details return_meta_info return_sampling_mask return_entropy", False),
    **_all("return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs", False),
}
_ANY = _CONSTRAINED | _SAMPLED | _ENDED | _PROMPTED | _RETURNED | {"sampling_seed": ()}

CHAT: Neutral = _ANY | {"echo": (False,), "prompt": (), "add_special_tokens": (False,)}
COMPLETION: Neutral = _ANY | {
    "messages": (),
    "add_special_tokens": (True,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "chat_template_kwargs": ({},),
}
_NEW_TOKENS = ("max_new_tokens", "min_new_tokens", "sampling_seed")  # SGLang's own names
_GENERATED = ("text", "input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "return_text_in_logprobs")

# Names of OpenAI's in a request of SGLang's, and of sampling beside its sampling_params.
INSTEAD_IN_SAMPLING_PARAMS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "logit_bias", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", *_NEW_TOKENS),
)
INSTEAD_IN_GENERATE = {name: f"sampling_params.{name}" for name in _SAMPLING} | {
    **{theirs: f"sampling_params.{ours}" for theirs, ours in INSTEAD_IN_SAMPLING_PARAMS.items()},
    "prompt": "text",
    "messages": "text (of a chat template's making)",
    "logprobs": "return_logprob",
}

SAMPLING_PARAMS: Neutral = {
    **{name: neutral for name, neutral in (_CONSTRAINED | _SAMPLED | _ENDED).items() if name not in _NEW_TOKENS},
    **dict.fromkeys(INSTEAD_IN_SAMPLING_PARAMS, ()),
}
GENERATE: Neutral = {
    **{name: neutral for name, neutral in _ANY.items() if name not in _GENERATED},
    **dict.fromkeys(INSTEAD_IN_GENERATE, ()),
    "return_cached_tokens_details": (True, False),  # its answers always have them
    "kv_transfer_params": ({},),
    "echo": (False,),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),  # each event counts the tokens
}
# Of a message of a chat, and of a request for the tokens of a text.
MESSAGE: Neutral = {
    **_all("function_call audio", {}),
    **_all("refusal", ""),
    **_all("tools", []),
    **_all("prefix partial", False),
}
TOKENIZE: Neutral = {"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()}

INSTEAD = {  # the supported name of the same feature
    **dict.fromkeys(("max_new_tokens", "max_length", "n_predict"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **dict.fromkeys(("enable_thinking", "reasoning_effort"), "chat_template_kwargs"),
    **dict.fromkeys(("extra_body", "sampling_params"), "the fields in it"),
}

# --- ignored: they change nothing that a client could read

HARMLESS = frozenset(
    {
        # identity of the client and the request
        *("user", "metadata", "store", "safety_identifier", "request_id", "rid", "session_id", "conversation_id"),
        *("custom_labels", "routing_key", "external_trace_header", "log_metrics", "no_logs", "received_time"),
        # when and where it is computed
        *("priority", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention", "background"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size", "kv_hints"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        # granularity of streaming
        *("stream_interval", "stream_reasoning"),
        # of reasoning, which is not parsed out of an answer here
        *("separate_reasoning", "require_reasoning"),
        # of images and audio, which are refused as message parts
        *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs", "images_config", "video_config"),
        *("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
        *("use_audio_in_video", "mm_hashes", "mm_content_hashes"),
        # of what is refused above
        *("truncation_side", "routed_experts_prompt_start", "routed_experts_start_len", "guided_decoding_backend"),
        *("guided_whitespace_pattern", "early_stopping", "mirostat_tau", "mirostat_eta", "return_token_offsets"),
        *("return_flat_raw_top_logprobs_b64", "dry_base", "dry_allowed_length", "xtc_threshold", "dynatemp_exponent"),
        # of messages, parts and stream options
        *("messages.annotations", "messages.phase", "messages.weight", "messages.id", "messages.content.cache_control"),
        "stream_options.include_obfuscation",
    }
)


def same(one: Any, other: Any) -> bool:
    """Equal, where 0 and false differ."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def unmet(given: dict[str, Any], refused: Neutral) -> str | None:
    """The first given field that asks for an unsupported feature."""
    for name, value in given.items():
        if name in refused and value is not None and not any(same(value, ok) for ok in refused[name]):
            return name
    return None


def unread(given: dict[str, Any], refused: Neutral) -> Iterator[str]:
    """The names of the given fields that are ignored."""
    return (name for name, value in given.items() if name not in refused and value is not None)


class Ignored:
    """Counts the requests in which each field was ignored and logs its first time. The number of names is bounded."""

    MOST_NAMES = 64  # that are in no list here
    MOST_LETTERS = 64  # of such a name
    OTHERS = "(others)"

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._unknown = 0  # names kept that are in no list here
        self._lock = threading.Lock()

    def note(self, names: set[str]) -> None:
        """Count the ignored fields of one request."""
        with self._lock:
            kept = {self._kept(name) for name in names}
            new = [name for name in kept if name not in self._counts]
            self._counts.update(kept)
        for name in new:
            if name in HARMLESS:
                log.info("%r in requests is ignored: it changes no answer", name)
            elif name == self.OTHERS:
                log.warning("more fields of requests are ignored than there is room for their names")
            else:
                log.warning("%r in requests is ignored: nothing here knows it", name)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _kept(self, name: str) -> str:
        """The name under which a field is counted."""
        if name in HARMLESS or name in self._counts:
            return name
        if len(name) > self.MOST_LETTERS or self._unknown >= self.MOST_NAMES:
            return self.OTHERS
        self._unknown += 1
        return name
