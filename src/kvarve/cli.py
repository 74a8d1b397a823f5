"""The command line: parses arguments into settings. An error is one line that begins with "kvarve: ".

Exit codes: 0 done, 1 a proof or verification failed, 2 a setting or resource cannot be used (nothing has been changed
then), 130 interrupted. Heavy modules are imported only after the arguments are parsed.
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from kvarve import __version__
from kvarve.config import CacheConfig
from kvarve.core.policies import Policies
from kvarve.errors import ConfigError, KvarveError
from kvarve.sizes import parse_size

API_KEY_VARIABLE = "KVARVE_API_KEY"
ADMIN_KEY_VARIABLE = "KVARVE_ADMIN_KEY"
LEVELS = ("debug", "info", "warning", "error")

_EXAMPLE = """\
example:
  kvarve serve --storage 'file:///var/kvarve?capacity=100GiB' --host-memory 4GiB
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time"}'
"""

_VERIFY = """\
It computes random prompts without a cache, then through caches of its own on every path, and compares all logits bit
for bit; then it damages pages of every pool on purpose and checks that the damage is noticed.
Exit codes: 0 proved, 1 logits differ or damage went unnoticed, 2 it cannot run.
"""

_STORAGE = """\
attach, detach and status talk to a server; the others maintain a folder, also while servers use it.

example:
  export KVARVE_ADMIN_KEY=...
  kvarve storage attach 'file:///var/kvarve?capacity=100GiB' --back-up
  kvarve storage stat /var/kvarve
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError with one line instead of printing the usage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)
        self.commands: dict[str, _Parser] = {}  # its subcommands

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def option(self, flag: str, help_text: str, **kwargs: Any) -> None:
        if kwargs.get("default") is not None:
            help_text += " (default %(default)s)"
        self.add_argument(flag, help=help_text, **kwargs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; answers the exit code."""
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        command: Callable[[argparse.Namespace], int | None] = args.command
        return command(args) or 0
    except KvarveError as e:
        print(f"kvarve: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = at = _parsers(argv)
    rest = [*argv]
    while at.commands and (word := next((word for word in rest if not word.startswith("-")), None)) is not None:
        if word not in at.commands:
            raise ConfigError(f"unknown command {word!r}{_closest(word, at.commands)}; known: {', '.join(at.commands)}")
        at, rest = at.commands[word], rest[rest.index(word) + 1 :]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for flag in at._option_string_actions if flag.startswith("--")]
        word = unknown[0].partition("=")[0]
        kind = "option" if word.startswith("-") else "argument"
        raise ConfigError(f"unknown {kind} {word!r}{_closest(word, flags)} (see {at.prog} --help)")
    if at.commands:
        raise ConfigError(f"which command? known: {', '.join(at.commands)} (see {at.prog} --help)")
    return args


def _closest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _parsers(words: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="kvarve", description="A hierarchical prefix cache for hybrid language models.", epilog=_EXAMPLE
    )
    parser.add_argument("--version", action="version", version=f"kvarve {__version__}")
    commands = parser.add_subparsers(title="commands", parser_class=_Parser)
    text = "an OpenAI-compatible server with the cache inside"
    serve = commands.add_parser("serve", help=text, description=f"Run {text}.", epilog=_EXAMPLE)
    _serve_options(serve)
    text = "measure what the cache does on this machine"
    demo = commands.add_parser("demo", help=text, description=f"{text[0].upper()}{text[1:]}.")
    demo.set_defaults(command=_demo)
    demo.option("--out", "folder for what it writes", type=Path, default=Path("out"), metavar="DIR")
    demo.option("--model", "builtin:... or a checkpoint folder", default="builtin:tiny-hybrid")
    demo.add_argument("--quick", action="store_true", help="a shorter run")
    demo.option("--port", "port of the server that it starts, 0 for any free one", type=_port, default=0)
    apart = "see kvarve serve --help; by the model unless given"
    demo.option("--tokens-per-snapshot", apart, type=_count, metavar="N")
    demo.option("--storage", "an empty one, such as mooncake://10.0.0.1; files below --out unless given", metavar="URL")
    text = "prove on a model of your own that the cache never changes a logit"
    verify = commands.add_parser("verify", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_VERIFY)
    _verify_options(verify)
    text = "replay a trace through the cache's own code and say what memory buys"
    simulate = commands.add_parser("simulate", help=text, description=f"{text[0].upper()}{text[1:]}.")
    simulate.set_defaults(command=_simulate)
    if "simulate" in words[:1]:
        from kvarve.simulate import add_arguments  # the core comes with it

        add_arguments(simulate)
    text = "list which models can be cached, and what is cached of each"
    models = commands.add_parser("models", help=text, description=f"{text[0].upper()}{text[1:]}.")
    models.set_defaults(command=_models)
    models.option("--model", "builtin:... or a folder with config.json; its weights are not read", metavar="NAME")
    models.option("--json", "write all of it there too", type=Path, metavar="FILE")
    models.option(
        "--page-tokens", "tokens of a page; 64, or what a model needs, unless given", type=_count, metavar="N"
    )
    chunk = "tokens of a prompt that are computed at once; 256, or what a model needs, unless given"
    models.option("--chunk-tokens", chunk, type=_count, metavar="N")
    models.option("--dtype", "for --model: auto, float32, bfloat16 or float16", default="auto")
    text = "attach a storage to a running server, detach it, or maintain a storage folder"
    storage = commands.add_parser("storage", help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_STORAGE)
    _storage_commands(storage)
    parser.commands = {
        "serve": serve,
        "demo": demo,
        "verify": verify,
        "simulate": simulate,
        "models": models,
        "storage": storage,
    }
    return parser


def _storage_commands(parser: _Parser) -> None:
    """The subcommands of `kvarve storage`."""
    kinds = parser.add_subparsers(title="commands", parser_class=_Parser)
    text = "attach a storage to a running server, in place of the one that it has"
    attach = kinds.add_parser("attach", help=text, description=f"{text[0].upper()}{text[1:]}.")
    attach.set_defaults(command=_storage_attach)
    where = "such as file:///var/kvarve?capacity=100GiB, as the server sees it; several are tiers, the fast one first"
    attach.add_argument("url", help=where, nargs="+", metavar="URL")
    attach.add_argument("--back-up", action="store_true", help="store what the server has in memory already")
    attach.option("--prefetch-policy", "from then on; as it is unless given", metavar="POLICY")
    attach.option("--write-policy", "from then on; as it is unless given", metavar="POLICY")
    text = "detach the storage of a running server; its pages stay"
    detach = kinds.add_parser("detach", help=text, description=f"{text[0].upper()}{text[1:]}.")
    detach.set_defaults(command=_storage_detach)
    text = "show the storage attached to a running server, and its state"
    status = kinds.add_parser("status", help=text, description=f"{text[0].upper()}{text[1:]}.")
    status.set_defaults(command=_storage_status)
    for command in (attach, detach, status):
        command.option("--server", "where it listens", default="http://127.0.0.1:8000", metavar="URL")
        command.option("--admin-key", f"its admin key; ${ADMIN_KEY_VARIABLE} says it unseen by `ps`", metavar="KEY")
    texts = {
        "ls": "list the pages in a folder, most recently used first",
        "stat": "summarize the pages in a folder by model, group and pool",
        "verify": "read every page in a folder and report damaged ones; exits with 1 if there are any",
        "gc": "free pages past the URL's ttl and leftovers of dead processes in a folder",
        "drop": "remove a group's pages, a model's, or all, from a folder",
    }
    folders = {}
    for does, text in texts.items():
        command = folders[does] = kinds.add_parser(does, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(command=_storage_care, does=does)
        command.add_argument(
            "url", help="such as file:///var/kvarve or /var/kvarve, its capacity or not", metavar="URL"
        )
        command.option("--json", "write all of it there too; -: to standard output, and nothing else", metavar="FILE")
    folders["ls"].option("--group", "of this group alone; its first digits will do", metavar="GROUP")
    folders["ls"].option("--limit", "how many to list, 0 for all", type=_whole, default=20, metavar="N")
    folders["ls"].option("--by", "used or stored, the newest first, or size", default="used", metavar="ORDER")
    text = "also remove models that no process has open and that were not used for this long, such as 30d"
    folders["gc"].option("--unused-for", text, metavar="TIME")
    what = folders["drop"].add_mutually_exclusive_group(required=True)
    what.add_argument("--group", help="this group's pages; its first digits will do", metavar="GROUP")
    what.add_argument("--model", help="the model whose fingerprint begins so", metavar="FINGERPRINT")
    what.add_argument("--all", action="store_true", help="every model")
    folders["drop"].add_argument("--yes", action="store_true", help="do not ask")
    parser.commands = {"attach": attach, "detach": detach, "status": status, **folders}


def _serve_options(parser: _Parser) -> None:
    option = parser.option
    parser.set_defaults(command=_serve)
    option("--model", "builtin:... or a folder with config.json", default="builtin:tiny-hybrid")
    option("--served-model-name", "the name that clients ask for; the model's own unless given", metavar="NAME")
    option("--host", "address to listen on", default="127.0.0.1")
    option("--port", "port to listen on, 0 for any free one", type=_port, default=8000)
    option("--device-memory", "for pages beside the model", type=_size, default="256MiB", metavar="SIZE")
    option("--host-memory", "for pages that left the device, 0 for none", type=_size, default="512MiB", metavar="SIZE")
    where = "such as file:///var/kvarve?capacity=100GiB; none unless given; several are tiers, the fast one first"
    option("--storage", where, action="append", metavar="URL")
    option("--page-tokens", "tokens of a page; has to divide --chunk-tokens", type=_count, default=64, metavar="N")
    option("--chunk-tokens", "tokens of a prompt that are computed at once", type=_count, default=256, metavar="N")
    option("--dtype", "auto, float32, bfloat16 or float16", default="auto")
    option("--device", "where to compute, as torch names it", default="cpu")
    option("--write-policy", "write_through, write_through_selective or write_back", default="write_through")
    option("--selective-uses", "uses after which write_through_selective writes", type=_count, default=2, metavar="N")
    option("--prefetch-policy", "how to wait for storage: best_effort, timeout or wait_complete", default="timeout")
    option("--prefetch-base-s", "seconds to wait for storage", type=_seconds, default=2.0, metavar="S")
    option("--prefetch-per-ki-token-s", "and per 1,024 tokens", type=_seconds, default=0.25, metavar="S")
    hangs = "seconds after which a call to storage counts as hanging"
    option("--storage-deadline-s", hangs, type=_seconds, default=30.0, metavar="S")
    option("--snapshot-every", "also keep windows and states every N tokens", type=_whole, default=0, metavar="N")
    least = "the fewest tokens that a kept window or state has to save"
    option("--snapshot-gap", least, type=_whole, default=0, metavar="N")
    apart = "divide memory as if windows and states were kept every N tokens; by the model unless given"
    option("--tokens-per-snapshot", apart, type=_count, default=0, metavar="N")
    option("--eviction", "eviction order: lru, lfu, s3fifo, priority or flops", default="lru", metavar="ORDER")
    doubles = "tokens after which attention costs as much as all else, for --eviction flops; 0: never"
    option("--cost-doubles-at", doubles, type=_whole, default=0, metavar="N")
    least = "the fewest tokens that a copy from the host to the device has to save"
    option("--load-at-least", least, type=_whole, default=0, metavar="N")
    option("--fetch-at-least", "and one from storage to the host", type=_whole, default=0, metavar="N")
    option("--host-share", "of host memory, what waiting for storage may hold", type=_share, default=0.8, metavar="X")
    pays = "of the bytes stored, the share that has to be used, or storing pauses until it would pay again; 0: never"
    option("--offload-pays-at", pays, type=_share, default=0.01, metavar="X")
    parser.add_argument(
        "--no-verify-host", dest="verify_host", action="store_false", help="trust host memory: do not check its pages"
    )
    option("--max-running", "requests side by side, if memory allows", type=_count, default=64, metavar="N")
    option("--max-waiting", "requests that may wait; more get 503", type=_count, default=256, metavar="N")
    most = "tokens computed in one step, answers first; at least a chunk of a prompt"
    option("--turn-tokens", most, type=_count, default=512, metavar="N")
    parser.add_argument("--deterministic", action="store_true", help="answers depend on their prompt to the last bit")
    option("--threads", "of torch; its own choice unless given", type=_count, metavar="N")
    option("--api-key", f"that clients must send; ${API_KEY_VARIABLE} says it unseen by `ps`", metavar="KEY")
    option(
        "--admin-key",
        f"opens /admin, off without one; ${ADMIN_KEY_VARIABLE} says it unseen by `ps`",
        metavar="KEY",
    )
    option("--log-level", ", ".join(LEVELS), default="info", metavar="LEVEL")
    option("--ready-file", "gets the URL as soon as connections are accepted", type=Path, metavar="PATH")


def _verify_options(parser: _Parser) -> None:
    option = parser.option
    parser.set_defaults(command=_verify)
    option("--model", "builtin:... or a folder with config.json", default="builtin:tiny-hybrid")
    option("--dtype", "auto, float32, bfloat16 or float16", default="auto")
    option("--device", "where to compute, as torch names it", default="cpu")
    option("--page-tokens", "tokens of a page; has to divide --chunk-tokens", type=_count, default=64, metavar="N")
    option("--chunk-tokens", "tokens of a prompt that are computed at once", type=_count, default=256, metavar="N")
    option(
        "--tokens",
        "the most tokens of a prompt; what the model's windows ask for unless given",
        type=_count,
        metavar="N",
    )
    option("--seed", "of all prompts and of everything that is drawn", type=_whole, default=7, metavar="N")
    option("--storage", "where to keep pages meanwhile; a folder of its own unless given", metavar="URL")
    option("--json", "gets the report too", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts")


def _serve(args: argparse.Namespace) -> None:
    if args.log_level not in LEVELS:
        raise ConfigError(f"unknown log level {args.log_level!r}; known: {', '.join(LEVELS)}")
    cache = CacheConfig(
        device_memory=args.device_memory,
        host_memory=args.host_memory,
        storage=tuple(args.storage or ()),
        policies=_policies(args),
    )
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    from kvarve.server import serve  # torch and transformers take seconds to import

    settings = serve.Settings(
        cache=cache,
        model=args.model,
        served_model_name=args.served_model_name,
        host=args.host,
        port=args.port,
        page_tokens=args.page_tokens,
        chunk_tokens=args.chunk_tokens,
        dtype=args.dtype,
        device=args.device,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        turn_tokens=args.turn_tokens,
        deterministic=args.deterministic,
        threads=args.threads,
        api_key=os.environ.get(API_KEY_VARIABLE) if args.api_key is None else args.api_key,
        admin_key=os.environ.get(ADMIN_KEY_VARIABLE) if args.admin_key is None else args.admin_key,
        ready_file=args.ready_file,
    )
    serve.run(settings, lambda text: print(text, flush=True))


def _policies(args: argparse.Namespace) -> Policies:
    return Policies(**{each.name: vars(args)[each.name] for each in fields(Policies) if each.name in args})


def _storage_attach(args: argparse.Namespace) -> None:
    asked = {"url": args.url, "back_up": args.back_up}
    policies = {"prefetch_policy": args.prefetch_policy, "write_policy": args.write_policy}
    _ask_server("PUT", args, asked | {name: policy for name, policy in policies.items() if policy is not None})


def _storage_detach(args: argparse.Namespace) -> None:
    _ask_server("DELETE", args)


def _storage_status(args: argparse.Namespace) -> None:
    _ask_server("GET", args)


def _ask_server(method: str, args: argparse.Namespace, body: dict[str, Any] | None = None) -> None:
    from kvarve.server import remote

    key = os.environ.get(ADMIN_KEY_VARIABLE) if args.admin_key is None else args.admin_key
    if not key:
        raise ConfigError(f"this needs the server's admin key: give --admin-key or ${ADMIN_KEY_VARIABLE}")
    print(remote.describe(remote.storage(method, args.server, key, body)))


def _storage_care(args: argparse.Namespace) -> int:
    from kvarve import storage_cli

    return storage_cli.main(args)


def _demo(args: argparse.Namespace) -> int | None:
    from kvarve import demo

    return demo.main(args)


def _verify(args: argparse.Namespace) -> int:
    from kvarve import verify

    return verify.main(args)


def _simulate(args: argparse.Namespace) -> int:
    from kvarve import simulate

    return simulate.main(args)


def _models(args: argparse.Namespace) -> int:
    from kvarve.engine import families  # torch and transformers take seconds to import

    return families.main(args)


# --- types of options; argparse puts the option's name before the error


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _number(text: str, least: int, most: int | None, what: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)


def _count(text: str) -> int:
    return _number(text, 1, None, "a whole number above zero")


def _whole(text: str) -> int:
    return _number(text, 0, None, "a whole number")


def _port(text: str) -> int:
    return _number(text, 0, 65535, "a port: 0 to 65535")


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
