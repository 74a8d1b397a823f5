"""Make a model of the Qwen3.5 architecture with random weights: 0.1 billion parameters, or a small one.

    python tools/random_qwen3_5.py FOLDER [--small]

Its output is noise, but it costs what such a model costs: nine Gated DeltaNet layers and three of full attention,
6,144 bytes of KV for each token and about 2.6 MB of recurrent state. Benchmarks measure on it; nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

sys.path.append(str(Path(__file__).parents[1]))
from tests.sim.models import EOS, PAD, save_checkpoint

BASE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 32768,
}
LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16, "max_position_embeddings": 65536} | {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32} | {
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def make(folder: Path, small: bool = False, seed: int = 0, **changed: Any) -> Any:
    """Write a checkpoint that `kvarve serve --model FOLDER` loads; the model, too. Sizes may be changed by name, as
    `LARGE` does: 0.9 billion parameters."""
    shape = BASE | (SMALL if small else {}) | changed
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(
        **shape,
        layer_types=layers * (shape["num_hidden_layers"] // len(layers)),
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, folder, config.vocab_size)  # an answer's tokens have text, as a stream sends it
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Qwen3.5-like model with random weights.")
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--small", action="store_true", help="half a million parameters instead of 0.1 billion")
    args = parser.parse_args()
    model = make(args.folder, args.small)
    print(f"{args.folder}: {sum(tensor.numel() for tensor in model.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
