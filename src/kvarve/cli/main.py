"""The command line: each command's options are the fields of a dataclass. An error is one line after "kvarve: ".

Exit codes: 0 done, 1 a proof or verification failed, 2 a setting or resource cannot be used (nothing has been changed
then), 130 interrupted. Heavy modules are imported only after the arguments are parsed.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from kvarve import __version__
from kvarve.bench.bench_command import bench
from kvarve.errors import ConfigError, KvarveError, require_assertions
from kvarve.reference.server.logs import begin_log
from kvarve.reference.server.serve_settings import ADVANCED, GROUPS, Settings
from kvarve.settings.commands import Attach, Demo, Models, Remote, Verify
from kvarve.settings.options import ConfigFile, Help, call, example, needs, root_app
from kvarve.settings.translate import Measures, command_of, in_words, translated
from kvarve.storage.urls import shown

_SERVE = example(
    "kvarve serve --storage 'file:///var/kvarve?capacity=100GiB' --host-memory 4GiB",
    """curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The try statement"}'""",
)
_STORAGE = example(
    "export KVARVE_ADMIN_KEY=...",
    "kvarve storage attach 'file:///var/kvarve?capacity=100GiB' --back-up",
    "kvarve storage stat /var/kvarve",
)
_CONFIG = example("kvarve config show --changed --config kvarve.toml --port 9000")
_KEYS = example("kvarve keys new team-a --salt team-a --file keys.toml", "kvarve serve --api-keys keys.toml")

# The options in the help of `kvarve plan`, and those that `kvarve simulate` has beside them.
PLANNED = {
    "Plan": "device-memory target picture limit json config",
    "Model": "model dtype kv-cache-dtype kv-bytes-per-token state-bytes window-tokens window-bytes-per-token "
    "page-tokens chunk-tokens cost-doubles-at block-tokens",
    "Servers and policies": "replicas routing write-policy keep-states eviction salt-share",
}
SIMULATED = {
    "Memory": "device-memory host-memory storage-memory sweep limit json config",
    "Model": PLANNED["Model"],
    "Servers and policies": PLANNED["Servers and policies"],
    "Speeds": "prefill-tokens-per-s host-bytes-per-s storage-bytes-per-s storage-wait",
    "Needed by few": "states load-at-least fetch-at-least host-share offload-pays-at storage-deadline-s verify-host "
    "hash-sample",
}

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(name="SHELL", help="Shell to write for")]
Urls = Annotated[
    tuple[str, ...],
    Parameter(
        name="URL",
        help="URL of a storage, as the server sees it, such as file:///var/kvarve?capacity=100GiB. Give several for "
        "several tiers, the fast one first",
    ),
]

app = root_app(
    "kvarve",
    "A hierarchical prefix cache for hybrid language models. The options of a command that has --config are also read "
    "from the environment ($KVARVE_SERVE_HOST_MEMORY) and from the TOML file that --config names, in this order.",
    f"kvarve {__version__}",
    help_epilogue=example("kvarve demo --quick", "kvarve serve --host-memory 4GiB"),
)
storage = App(
    "storage",
    help="Attach a storage to a running server, detach it, or maintain a storage folder. "
    "attach, detach and status talk to a server; the others maintain a folder, also while servers use it.",
    help_epilogue=_STORAGE,
)


config = App(
    "config",
    help="Look at settings and where they come from: flags, the environment, the file of --config, defaults.",
    help_epilogue=_CONFIG,
)
keys = App(
    "keys", help="Make API keys and look at a file of them, which `kvarve serve --api-keys` reads.", help_epilogue=_KEYS
)


# A thread of torch (libgomp) that waits for the others looks so often before it sleeps, for some 0.1 ms: as fast as
# libgomp's default of 300,000 on idle cores. Beside two busy loops on 2 cores, the default multiplied small matrices
# 300 times slower, and started the server in 9 to 44 s instead of 7.
SPINS = "3000"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read where torch is imported, by the processes of ranks, too
    try:
        require_assertions()
        words = [*(sys.argv[1:] if argv is None else argv)]
        served = next((len(chain) for chain in (["serve"], ["config", "show"]) if words[: len(chain)] == chain), 0)
        if served:
            words[served:] = _translated(words[served:])
        return call(app, words) or 0
    except KvarveError as e:
        print(f"kvarve: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _measures() -> Measures:
    with needs("engine", "memory as a number of tokens or a share of a GPU"):
        from kvarve.reference.server import measures  # it loads torch

    return measures


def _translated(words: Sequence[str], foreign: bool = False) -> list[str]:
    """The words of `kvarve serve` or `config show`, of which some may be another engine's; or (`foreign`) all are."""
    arguments = app["config"]["show"].assemble_argument_collection()
    known = {name for each in arguments for name in each.names} | {"--help", "-h", "--version"}

    def note(text: str) -> None:
        print(f"kvarve: {text}", file=sys.stderr)

    return translated(words, known, Settings.device_memory, _measures, note, shown, foreign)


@app.command(help_epilogue=_SERVE, help_formatter=Help(GROUPS, "kvarve config show --help"))
def serve(*, settings: Settings = Settings(), config: ConfigFile = None) -> None:
    """Run an OpenAI-compatible server with the cache inside."""
    begin_log(settings.log_level, settings.log_format)
    with needs("server", "serve"):
        from kvarve.reference.server import serve  # torch and transformers take seconds to import

    serve.run(settings, lambda text: print(text, flush=True))


@app.command(help_epilogue=example("kvarve demo --quick --out out"))
def demo(*, options: Demo = Demo(), config: ConfigFile = None) -> int:
    """Measure what the cache does on this machine."""
    if options.engine == "vllm":
        with needs("server", "demo --engine vllm"):
            from kvarve.bench import demo_vllm

        return demo_vllm.main(options)
    with needs("demo", "demo"):
        from kvarve.bench import demo

    return demo.main(options)


@app.command(help_format="markdown", help_epilogue="example:\n\n    kvarve verify --model /models/Qwen3-0.6B --quick")
def verify(*, options: Verify = Verify(), config: ConfigFile = None) -> int:
    """Prove on a model of your own that the cache never changes a logit.

    It computes random prompts without a cache, then through caches of its own on every path, and compares all logits
    bit for bit; then it damages pages of every pool on purpose and checks that the damage is noticed.

    Exit codes: 0 proved, 1 logits differ or damage went unnoticed, 2 it cannot run.
    """
    with needs("engine", "verify"):
        from kvarve.reference import verify

    return verify.main(options)


app.command(
    "kvarve.planner.simulate_command:main",
    name="simulate",
    help="Replay a trace through the cache's own code and say what memory buys.",
    help_epilogue=example(
        "kvarve simulate trace.jsonl --model /models/Qwen3.5-9B --device-memory 40GiB --host-memory 200GiB",
        "kvarve simulate trace.jsonl --kv-bytes-per-token 128KiB --sweep sweep.png",
    ),
    help_formatter=Help(SIMULATED),
)
app.command(
    "kvarve.planner.simulate_command:plan",
    name="plan",
    help="Say how much host memory and storage a hit rate takes, for a trace of prompts.",
    help_epilogue=example("kvarve plan trace.jsonl --model /models/Qwen3.5-9B --device-memory 40GiB --target 90%"),
    help_formatter=Help(PLANNED),
)


app.command(bench)


@app.command(help_epilogue=example("kvarve models", "kvarve models --model /models/Qwen3.5-9B"))
def models(*, options: Models = Models(), config: ConfigFile = None) -> int:
    """List which models can be cached, and what is cached of each."""
    with needs("engine", "models"):
        from kvarve.reference.engine import families  # torch and transformers take seconds to import

    return families.main(options)


@app.command(
    help_epilogue=example("kvarve doctor", "KVARVE=1 KVARVE_STORAGE=file:///var/kvarve?capacity=1TiB kvarve doctor")
)
def doctor() -> int:
    """Say whether kvarve can work behind the vLLM or SGLang of this environment, and what to do if not."""
    from kvarve.cli import doctor as checks

    return checks.main()


# --- kvarve storage: of a running server

app.command(storage)


@storage.command(help_epilogue=example("kvarve storage attach 'file:///var/kvarve?capacity=100GiB' --back-up"))
def attach(urls: Urls, /, *, options: Attach = Attach()) -> None:
    """Attach a storage to a running server, in place of the one that it has."""
    policies = {"storage_wait": options.storage_wait, "write_policy": options.write_policy}
    _ask_server("PUT", options, {"url": [*urls], "back_up": options.back_up} | policies)


@storage.command(help_epilogue=example("kvarve storage detach --server http://127.0.0.1:8000"))
def detach(*, options: Remote = Remote()) -> None:
    """Detach the storage of a running server; its pages stay."""
    _ask_server("DELETE", options)


@storage.command(help_epilogue=example("kvarve storage status --server http://127.0.0.1:8000"))
def status(*, options: Remote = Remote()) -> None:
    """Show the storage attached to a running server, and its state."""
    _ask_server("GET", options)


def _ask_server(method: str, options: Remote, body: dict[str, Any] | None = None) -> None:
    with needs("server", "storage"):
        from kvarve.cli import admin_client

    if not options.admin_key:
        raise ConfigError("this needs the server's admin key: give --admin-key or $KVARVE_ADMIN_KEY")
    print(admin_client.storage(method, options.server, options.admin_key, body))


# --- of a folder or a bucket

for _name, _help, _more in (
    ("ls", "List the pages in a storage, most recently used first.", " --by size"),
    ("stat", "Summarize the pages in a storage by model, group and pool.", ""),
    ("verify", "Read every page in a storage and report damaged ones; exits with 1 if there are any.", " --json -"),
    ("gc", "Free pages past the URL's ttl and leftovers of dead processes in a storage.", " --unused-for 30d"),
    ("drop", "Remove a group's pages, a model's, or all: one of --group, --model and --all.", " --group 1f3a"),
):
    _shown = example(f"kvarve storage {_name} /var/kvarve{_more}")
    storage.command(f"kvarve.cli.storage_commands:{_name}", name=_name, help=_help, help_epilogue=_shown)

# --- kvarve config, kvarve completion


def _as_served(*given: Any) -> None:
    from kvarve.cli.config_commands import reads

    reads(*given)


app.command(config)
config.command(
    "kvarve.cli.config_commands:show",
    name="show",
    help="Show the settings that `kvarve serve` would have with these options.",
    help_epilogue=_CONFIG,
    help_formatter=Help(GROUPS | {"Needed by few": ADVANCED, "Output": "changed json"}),
    config=[_as_served],
)


def _from(command: Annotated[str, Parameter(name="COMMAND", help="Command in quotes, with its variables")], /) -> None:
    variables, flags = command_of(command)
    print(in_words(_translated(flags, foreign=True), shown, variables))


for _engine, _theirs in (("sglang", "python -m sglang.launch_server"), ("vllm", "vllm serve")):
    config.command(
        _from,
        name=f"from-{_engine}",
        help=f"Print the command of kvarve serve that does what a command of `{_theirs}` does.",
        help_epilogue=example(f"kvarve config from-{_engine} '{_theirs} --model /models/Qwen3.5-9B --tp 2'"),
    )


@app.command(help_epilogue=example("kvarve completion bash > ~/.local/share/bash-completion/completions/kvarve"))
def completion(shell: Shell, /) -> None:
    """Write a script that completes commands and options in a shell."""
    print(app.generate_completion(prog_name="kvarve", shell=shell))


# --- kvarve keys

app.command(keys)
keys.command(
    "kvarve.cli.config_commands:new",
    name="new",
    help="Make a key: it is shown once, and kept nowhere.",
    help_epilogue=_KEYS,
)
keys.command(
    "kvarve.cli.config_commands:ls",
    name="ls",
    help="Check a file of keys, and list them.",
    help_epilogue=example("kvarve keys ls keys.toml"),
)
