"""`kvarve bench`: its subcommands; what they do is imported only then."""

from cyclopts import App

from kvarve.bench.bench_settings import Accuracy, Hash, Load, LongDocument, Multiturn, Serving, SharedPrefix
from kvarve.settings.options import ConfigFile, needs

EPILOGUE = """\
example:
  kvarve bench multiturn --clients 16 --turns 5 --json -
  kvarve bench serving --server http://127.0.0.1:8000 --rate 4 --input sharegpt.json
"""

bench = App(
    "bench",
    help="Measure a server, of any make: it is sent the same requests in rounds, around a flush. "
    "kvarve serve is started for it unless --server is given. docs/benchmarking.md explains the figures.",
    help_epilogue=EPILOGUE,
)


def _load(kind: str, options: Load) -> int:
    with needs("server", f"bench {kind}"):
        from kvarve.bench import run, workloads

    return run.load(kind, options, lambda: workloads.conversations(options))


@bench.command
def serving(*, options: Serving = Serving(), config: ConfigFile = None) -> int:
    """Send random prompts, ShareGPT's, or a trace's."""
    return _load("serving", options)


@bench.command
def multiturn(*, options: Multiturn = Multiturn(), config: ConfigFile = None) -> int:
    """Hold conversations: each turn's prompt has all turns before it."""
    return _load("multiturn", options)


@bench.command(name="shared-prefix")
def shared_prefix(*, options: SharedPrefix = SharedPrefix(), config: ConfigFile = None) -> int:
    """Send prompts of a few groups, each of which shares a long prefix."""
    return _load("shared-prefix", options)


@bench.command(name="long-document")
def long_document(*, options: LongDocument = LongDocument(), config: ConfigFile = None) -> int:
    """Ask several questions about each of a few long documents."""
    return _load("long-document", options)


@bench.command
def accuracy(*, options: Accuracy = Accuracy(), config: ConfigFile = None) -> int:
    """Ask questions with known answers: those of GSM8K and MMLU, or kvarve's own."""
    with needs("server", "bench accuracy"):
        from kvarve.bench import accuracy as questions

    return questions.main(options)


@bench.command(name="hash")
def hashes(*, options: Hash = Hash(), config: ConfigFile = None) -> int:
    """Compare the bytes of every page before and after each copy between tiers."""
    with needs("server", "bench hash"):
        from kvarve.bench import hashes as pages

    return pages.main(options)
