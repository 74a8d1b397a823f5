"""Many requests at once in the engine: bit for bit, and with rounded hits a difference to report."""

from kvarve.reference.engine.model import keeping_answers, with_rounded_hits
from kvarve.reference.verify.proof_plan import TURNS
from kvarve.reference.verify.prover import Prover
from kvarve.reference.verify.report import Rounding
from kvarve.reference.verify.watched import Answer, Question, Uncached, WatchedEngine

TALKS = 3  # conversations side by side
MOST_KEPT = 32  # tokens of an answer up to a chunk boundary; each takes a forward


def together(prover: Prover) -> None:
    """Requests of many lengths at once in little memory, one aborted: each answers as alone and uncached."""
    plan, most, salt = prover.plan, TURNS * prover.plan.decode, prover.salt
    uncached = Uncached(prover.model, most)
    shared, crossing = plan.prompt(plan.whole, 500), plan.prompt(max(1, plan.whole - 1), 502)
    prompts = [
        plan.prompt(plan.longest, 500),
        crossing,
        [*shared, *plan.prompt(plan.chunk // 2, 501)],
        [*shared, *plan.prompt(1, 503)],
        plan.prompt(1, 504),
    ]
    leaving = Question(prompts[2], most, salt, leaves=len(prompts[2]) + 1)
    questions = [Question(prompt, most, salt) for prompt in prompts]
    little = plan.longest + most  # so little that a request is preempted
    says = "the engine with --deterministic: many at once, one aborted"
    with prover.proof("together", says, stored=False, device=little) as (_, engine, _):
        for answer in engine.answers([*questions[:2], leaving, *questions[3:]]):
            prover.check(answer, uncached=uncached)
        # The first request computes the shared prefix for the others, so hits are certain only the second time.
        for answer in engine.answers(questions):
            prover.check(answer, plan.full(len(answer.prompt)), uncached=uncached)

        def then(prompt: list[int], resumes: int | None, about: str) -> None:
            (answer,) = engine.answers([Question(prompt, plan.decode, salt)])
            prover.check(answer, resumes, None, about)

        known = len(crossing) // plan.chunk * plan.chunk  # of the prompt alone
        then([*crossing, *uncached(crossing).tokens], known, "the next turn")
        # Pages that the first computes in a whole chunk are not shared with the second, which has half of that chunk.
        for tokens in (plan.whole + 1, plan.whole - plan.chunk // 2 + 1):
            then(plan.prompt(tokens, 506), None, "half of another's chunk")


def answers(prover: Prover) -> None:
    """Conversations at once, whose answers are computed again by prefill: the next turns resume behind them."""
    says = "the engine by default: the next turn hits the last answer, which was computed again by prefill"
    with prover.proof("answers", says, stored=False, deterministic=False, exact=True) as (_, engine, _):
        for turn in _next_turns(prover, engine, prover.plan.decode):
            engine.rest()
            (second,) = engine.answers([turn])  # alone: in a batch it would round by that
            engine.rest()
            prover.check(second, prover.plan.whole, None, "the next turn")


def _next_turns(prover: Prover, engine: WatchedEngine, most: int) -> list[Question]:
    """Conversations at once, whose first answers cross the line of a chunk: the questions that follow, for answers of
    `most` tokens."""
    plan, salt = prover.plan, prover.salt
    # Each answer computes the last tokens of a page, a few less than the one before it.
    decoded = max(1, min(plan.page, plan.whole, MOST_KEPT) - 1)
    prompts = [plan.prompt(plan.whole - max(1, decoded - number), 600 + number) for number in range(TALKS)]
    turns = []
    first = engine.answers([Question(prompt, plan.whole + 1 - len(prompt), salt) for prompt in prompts])
    for number, said in enumerate(first):
        prover.count(said)
        tail = plan.prompt(plan.longest - plan.whole - 1, 610 + number)
        turns.append(Question([*said.prompt, *said.found.tokens, *tail], most, salt))
    return turns


def _second_turns(prover: Prover, engine: WatchedEngine, answers: list[Answer]) -> None:
    """The second turns of conversations resume from pages that were decoded: these are added to `answers`."""
    for second in engine.answers(_next_turns(prover, engine, 1)):
        prover.count(second)
        if second.usage.cached != prover.plan.whole:
            prover.row.troubles.append(
                f"the second turn resumed after {second.usage.cached} tokens instead of {prover.plan.whole}: the pages "
                f"that the first answer decoded were not found"
            )
        answers.append(second)


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
    says = "the engine with --hits rounded: prompts resume at every page, and behind answers"
    with prover.proof("rounded", says, stored=False, model=model, deterministic=False) as (row, engine, _):
        for prompt, resumes in asked:
            (answer,) = engine.answers([Question(prompt, plan.decode, prover.salt)])
            prover.count(answer)
            if resumes is not None and answer.usage.cached != resumes:
                row.troubles.append(
                    f"a prompt of {len(prompt)} tokens resumed after {answer.usage.cached}, not {resumes}"
                )
            answers.append(answer)
        _second_turns(prover, engine, answers)
        row.compared += len(answers)
        found.tokens = sum(row.resumed.values())
        for answer in answers:
            found.take(answer.found, prover.uncached(answer.prompt), len(answer.prompt))
        prover.report.rounding = found
