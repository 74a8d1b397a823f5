"""Which class of transformers computes the text of a config; of one that also sees, without its eyes.

A checkpoint of a model that takes images wraps a language model and towers, which nothing but images goes through. The
wrapper computes text by itself, so that it is used as it is, under its own names of weights, but for the towers: their
weights are neither read nor counted.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from kvarve.errors import ModelError
from kvarve.reference.engine.model_errors import MISFITS, in_words


def model_class(config: Any) -> Any | None:
    """The class that computes text from text for this config, or None; importing it registers its cache layers.

    ModelError if it cannot be imported, for lack of a package.
    """
    kind, wraps = type(config), config.get_text_config(decoder=True) is not config
    try:
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        elif not config.is_encoder_decoder and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
        else:
            return None
    except ImportError as e:
        raise ModelError(f"{config.model_type}: {in_words(e)}") from e
    return without_towers(found) if wraps and not _of_text(config, found) else found


def own_config(config: Any) -> Any:
    """The part of a config that its model is built of: that of the text, if transformers has a class for it alone."""
    found, text = model_class(config), config.get_text_config(decoder=True)
    if found is None or not _of_text(config, found):
        return config
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantized
    return text


def _of_text(config: Any, found: Any) -> bool:
    """Whether a class is that of the text alone, which is a part of this config."""
    text = config.get_text_config(decoder=True)
    return isinstance(text, found.config_class) and not isinstance(config, found.config_class)


@cache
def without_towers(wrapper: Any) -> Any:
    """The class of a wrapper that keeps nothing but its language model."""

    def __init__(self: Any, config: Any) -> None:
        wrapper.__init__(self, config)
        kept = {self.get_decoder(), self.get_output_embeddings()}
        for name, part in [*self.base_model.named_children()]:
            if kept.isdisjoint(part.modules()):
                setattr(self.base_model, name, None)

    return _like(wrapper, __init__=__init__)


def require_causal(model: Any) -> None:
    """ModelError if a token attends to tokens ahead: pages of a prompt would serve no longer prompt.

    Layers that say so are known on the meta device, too; of others, weights have to be in memory.
    """
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise ModelError(f"{type(model).__name__}: {name} attends to tokens ahead, so no prefix can be cached")
    if model.device.type != "meta" and _looks_ahead(model):
        raise ModelError(f"{type(model).__name__} attends to tokens ahead, so no prefix can be cached")


def _looks_ahead(model: Any) -> bool:
    """Whether the first token's logits change with the tokens after it: otherwise their gradient is exactly 0."""
    embedded: list[Tensor] = []

    def differentiable(_: Any, __: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(differentiable)
    try:
        with torch.enable_grad():
            logits = model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
            (gradient,) = torch.autograd.grad(logits[0, 0].float().square().sum(), embedded[0])
    except (RuntimeError, *MISFITS):  # code that cannot be differentiated, or that does not compute at all
        return False
    finally:
        hook.remove()
    return bool(gradient[0, 1:].nan_to_num().any())


def _like(theirs: Any, **changed: Any) -> Any:
    """A class with the name and module of `theirs`, by which transformers knows how checkpoints name weights."""
    return type(theirs.__name__, (theirs,), {"__module__": theirs.__module__, **changed})
