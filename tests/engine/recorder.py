"""A model's output: its logits at every position, or a script that it follows; and the answer's pieces."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import Make, a_model, a_prompt, a_request, turns
from kvarve.reference.engine import turns as turns_module
from kvarve.reference.engine.requests import OutputChunk, Request
from kvarve.reference.engine.workspace import Workspace


class Recorder:
    """Stands between the engine and the model and keeps the logits after every forward, by position, per workspace."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward = turns_module.forward
        self.calls: list[tuple[Workspace, int, int]] = []  # workspace, tokens before and after
        self.logits: list[Tensor] = []
        self.before: Callable[[Workspace, Tensor], None] = lambda workspace, ids: None
        self.after: Callable[[Workspace, Tensor], Tensor] = lambda workspace, logits: logits
        monkeypatch.setattr(turns_module, "forward", self._record)

    def _record(self, model: Any, workspace: Workspace, ids: Tensor) -> Tensor:
        self.before(workspace, ids)
        start = workspace.tokens
        logits = self.after(workspace, self._forward(model, workspace, ids))
        self.calls.append((workspace, start, workspace.tokens))
        self.logits.append(logits.clone())
        return logits

    def take(self) -> dict[int, Tensor]:
        """The logits of one request by the number of tokens before them; then it begins anew."""
        found = {stop: logits for (_, _, stop), logits in zip(self.calls, self.logits, strict=True)}
        assert len(found) == len(self.calls), "more than one request has been recorded"
        self.calls, self.logits = [], []
        return found


def say(recorder: Recorder, script: Sequence[int], prompt_tokens: int = 5) -> None:
    """Have the model output these tokens, whatever its logits."""

    def scripted(workspace: Workspace, logits: Tensor) -> Tensor:
        said = workspace.tokens - prompt_tokens
        logits = torch.zeros_like(logits)
        logits[script[min(said, len(script) - 1)] if said >= 0 else 0] = 1
        return logits

    recorder.after = scripted


def pieces_of(request: Request) -> list[OutputChunk]:
    found = []
    while not request.outputs.empty():
        found.append(request.outputs.get())
    return found


def scripted(
    make: Make, recorder: Recorder, text: str, stop: tuple[str, ...], most: int = 200, **kwargs: Any
) -> list[OutputChunk]:
    script = [*a_model().tokenizer.encode(text), 256]
    say(recorder, script)
    engine, request = make(start=False), a_request(a_prompt(5), most, stop=stop, ignore_eos=False, **kwargs)
    engine.submit(request)
    turns(engine, lambda: engine.counts.finished == 1)
    return pieces_of(request)
