"""The names of fields that clients of other servers may send, by request model."""

import tomllib
from pathlib import Path

OTHERS = {
    model: names.split() for model, names in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
