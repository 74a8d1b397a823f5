"""The engine itself, many requests at once: bit for bit with `--deterministic`, and without it a difference to report.

The other paths compute one sequence at a time; here requests are served together.
"""

import queue
from collections.abc import Callable, Sequence

from torch import Tensor

from kvarve.errors import Broken
from kvarve.reference.engine.engine import Engine
from kvarve.reference.engine.model import LoadedModel, keeping_answers, with_rounded_hits
from kvarve.reference.engine.requests import Finish, Request, Sampling, TokenUsage
from kvarve.reference.verify.proof_plan import TURNS
from kvarve.reference.verify.proof_requests import Stuck, Transcript, Uncached
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.report import Rounding

ANSWER_S = 600.0  # between two tokens of one request, while others are computed
LEAVES_AFTER = 2  # tokens
TALKS = 3  # conversations side by side
MOST_KEPT = 32  # tokens of an answer up to a chunk boundary; each takes a forward

Answer = tuple[Sequence[int], Transcript]  # a prompt, and what was answered
Question = tuple[Sequence[int], int]  # a prompt, and how many tokens to answer
Ask = Callable[[Sequence[Question], Question | None], list[tuple[Transcript, TokenUsage]]]


def _serve(
    prover: Prover, model: LoadedModel, use: Callable[[Ask], None], *, deterministic: bool = False, device: int = 0
) -> None:
    """Call `use` with a function that asks an engine all questions at once and returns the answers; `leaves` is aborted
    on its way. Any rank but the first only computes."""
    with prover.cache(device=device, identity=model.identity) as cache:
        # With one chunk a turn, prefill and decoding overlap for as long as possible.
        engine = Engine(model, cache, turn_tokens=prover.plan.chunk, deterministic=deterministic)
        if prover.rank:
            if why := engine.follow():
                raise Broken(why)
            cache.scheduler.audit()
            return

        def ask(questions: Sequence[Question], leaves: Question | None = None) -> list[tuple[Transcript, TokenUsage]]:
            asked = [_ask(engine, prover.salt, question, question is leaves) for question in questions]
            if not engine.counts.finished:
                engine.start()  # not before all are submitted
            both = zip(questions, asked, strict=True)
            return [_answer(request, found, question is leaves) for question, (request, found) in both]

        try:
            use(ask)
        finally:
            engine.shutdown()
        cache.scheduler.audit()


def _ask(engine: Engine, salt: str, question: Question, leaves: bool) -> tuple[Request, Transcript]:
    prompt, most = question
    found = Transcript()

    def watch(logits: Tensor) -> None:
        found.take(len(prompt) + len(found.tokens), logits, len(prompt), most)
        if leaves and len(found.tokens) == LEAVES_AFTER:
            engine.abort(request)

    request = Request(prompt, Sampling(most, ignore_eos=True), salt, watch=watch)
    return engine.submit(request), found


def _answer(request: Request, found: Transcript, leaves: bool) -> tuple[Transcript, TokenUsage]:
    try:
        _, tokens, last = request.result(ANSWER_S)
    except queue.Empty:
        raise Stuck(f"the engine sent nothing for {ANSWER_S:.0f} s") from None
    if last.finish is not (Finish.ABORT if leaves else Finish.LENGTH) or last.usage is None:
        raise Stuck(f"a prompt of {len(request.prompt)} tokens ended with {last.finish}: {last.error}")
    if tokens != found.tokens:
        raise Stuck(f"a prompt of {len(request.prompt)} tokens was not answered with the likeliest tokens")
    return found, last.usage


def together(prover: Prover) -> None:
    """Requests of many lengths at once in little memory, one aborted: each answers as alone and uncached."""
    plan, most = prover.plan, TURNS * prover.plan.decode
    uncached = Uncached(prover.model, most)
    crossing = (plan.prompt(max(1, plan.whole - 1), 502), most)
    crossed = [*crossing[0], *uncached(crossing[0]).tokens]
    leaving = ([*plan.prompt(plan.whole, 500), *plan.prompt(plan.chunk // 2, 501)], most)
    questions = [
        (plan.prompt(plan.longest, 500), most),
        crossing,
        leaving,
        ([*plan.prompt(plan.whole, 500), *plan.prompt(1, 503)], most),
        (plan.prompt(1, 504), most),
    ]

    many = list[tuple[Sequence[int], Transcript, TokenUsage, int | None]]()
    single = list[tuple[Sequence[int], Transcript, TokenUsage, int | None, str]]()

    def use(ask: Ask) -> None:
        for leaves in (leaving, None):
            for (prompt, _), (found, usage) in zip(questions, ask(questions, leaves), strict=True):
                # The first request computes the shared prefix for the others, so hits are certain only the second time.
                many.append((prompt, found, usage, plan.full(len(prompt)) if leaves is None else None))
        known = len(crossing[0]) // plan.chunk * plan.chunk  # of the prompt alone
        single.append((crossed, *ask([(crossed, plan.decode)], None)[0], known, "the next turn"))
        # Pages that the first computes in a whole chunk are not shared with the second, which has half of that chunk.
        for tokens in (plan.whole + 1, plan.whole - plan.chunk // 2 + 1):
            prompt = plan.prompt(tokens, 506)
            single.append((prompt, *ask([(prompt, plan.decode)], None)[0], None, "half of another's chunk"))

    little = plan.longest + most  # so little that a request is preempted
    with prover.path("together", "the engine with --deterministic: many at once, one aborted"):
        _serve(prover, prover.model, use, deterministic=True, device=little)
        prover.compute([prompt for prompt, *_ in many], uncached)
        for prompt, found, usage, known in many:
            prover.compare(prompt, found, uncached(prompt), usage.tiers, known)
        prover.compute([prompt for prompt, *_ in single])
        for prompt, found, usage, known, about in single:
            prover.compare(prompt, found, prover.uncached(prompt), usage.tiers, known, about)


def answers(prover: Prover) -> None:
    """Conversations at once that resume from decoded pages: how much their logits differ from prefill."""
    found, said = Rounding("kept of answers"), list[Answer]()

    def use(ask: Ask) -> None:
        found.tokens = _second_turns(prover, ask, said)

    with prover.path("answers", "the engine by default: the next turn resumes from pages that the last answer decoded"):
        _serve(prover, keeping_answers(prover.model), use)
        _measure(prover, said, found)


def _measure(prover: Prover, answers: Sequence[Answer], found: Rounding) -> None:
    """How much the first logits of answers differ from those without a cache."""
    prover.compute([prompt for prompt, _ in answers])
    for prompt, said in answers:
        found.take(said, prover.uncached(prompt), len(prompt))
    prover.report.rounding = found


def _second_turns(prover: Prover, ask: Ask, answers: list[Answer]) -> int:
    """Conversations at once, whose first answers cross the line of a chunk and whose second turns resume there: these
    are added to `answers`. How many tokens of the first answers they resumed from."""
    plan = prover.plan
    # Each answer computes the last tokens of a page, a few less than the one before it.
    decoded = max(1, min(plan.page, plan.whole, MOST_KEPT) - 1)
    prompts = [plan.prompt(plan.whole - max(1, decoded - number), 600 + number) for number in range(TALKS)]
    first = ask([(prompt, plan.whole + 1 - len(prompt)) for prompt in prompts], None)
    for prompt, (_, usage) in zip(prompts, first, strict=True):
        prover.count(prompt, usage.tiers)
    tails = [plan.prompt(plan.longest - plan.whole - 1, 610 + number) for number in range(TALKS)]
    turns = [[*prompt, *said.tokens, *tail] for prompt, (said, _), tail in zip(prompts, first, tails, strict=True)]
    for prompt, (second, usage) in zip(turns, ask([(turn, 1) for turn in turns], None), strict=True):
        prover.count(prompt, usage.tiers)
        if usage.cached != plan.whole:
            prover.row.troubles.append(
                f"the second turn resumed after {usage.cached} tokens instead of {plan.whole}: the pages that the "
                f"first answer decoded were not found"
            )
        answers.append((prompt, second))
    return sum(plan.whole - len(prompt) for prompt in prompts)


def rounded(prover: Prover) -> None:
    """Prompts and answers that resume at every page: where, and how much their logits differ from those without a
    cache."""
    plan, model = prover.plan, keeping_answers(with_rounded_hits(prover.model))
    found, answers = Rounding("hits rounded"), list[Answer]()
    first, later = plan.prompt(plan.longest, 700), plan.chunk // 2 + 1
    leaving = [[*first[:later], *plan.prompt(plan.longest - later, 701 + number)] for number in range(2)]
    prompts = [plan.prompt(tokens, 710 + number) for number, tokens in enumerate(plan.lengths())]
    asked: list[tuple[list[int], int | None]] = [(prompt, 0) for prompt in prompts]
    asked += [(prompt, (len(prompt) - 1) // plan.page * plan.page) for prompt in prompts]
    asked += [(first, 0), (leaving[0], None), (leaving[1], later // plan.page * plan.page)]

    def use(ask: Ask) -> None:
        row = prover.row
        for prompt, resumes in asked:
            ((said, usage),) = ask([(prompt, plan.decode)], None)
            prover.count(prompt, usage.tiers)
            row.compared += 1
            if resumes is not None and usage.cached != resumes:
                row.troubles.append(f"a prompt of {len(prompt)} tokens resumed after {usage.cached}, not {resumes}")
            answers.append((prompt, said))
        _second_turns(prover, ask, answers)
        row.compared += TALKS
        found.tokens = sum(row.resumed.values())

    with prover.path("rounded", "the engine with --hits rounded: prompts resume at every page, and behind answers"):
        _serve(prover, model, use)
        _measure(prover, answers, found)
