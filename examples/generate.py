"""Transformers' own `generate`, cold and from the cache: python examples/generate.py MODEL [STORAGE]

MODEL is a folder, or a name on a model hub. STORAGE is a URL such as 'file:///var/kvarve?capacity=50GiB'; with one the
second run of this program finds what the first has stored. Needs: pip install '.[engine]'
"""

import sys
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvarve import CacheConfig
from kvarve.transformers import PrefixCachedModel


def main(name: str, storage: str | None = None) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    document = "A document about which several questions are asked. " * 100
    with PrefixCachedModel(model, CacheConfig("1GiB", "1GiB", storage=storage)) as prefixes:
        for question in ("What is it about?", "How long is it?", "Who wrote it?"):
            prompt = tokenizer(document + question, return_tensors="pt").input_ids
            began = time.monotonic()
            output = prefixes.generate(prompt, max_new_tokens=16, do_sample=False)
            usage, seconds = prefixes.usage, time.monotonic() - began
            print(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens cached, {seconds:.2f} s")
            print(f"  {question} {tokenizer.decode(output[0, prompt.shape[1] :])!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
