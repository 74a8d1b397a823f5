"""Train `builtin:tiny-hybrid`, the model that kvarve carries inside itself. Nothing is downloaded.

A hybrid of the Qwen3.5 architecture (three Gated DeltaNet layers, then one of full attention; 0.8 million parameters)
that does one thing reliably: find a fact in a few thousand tokens of other text. The answers rest on the attention
pages of the prompt; what the recurrent state adds is local, so that a wrong state shows in the logits and seldom in an
answer (`ablate` below measures both). Figures: docs/tiny-hybrid.md.

    python tools/train_tiny_hybrid.py                # train, write the checkpoint, measure it
    python tools/train_tiny_hybrid.py --quick        # a minute, to check that the script works
    python tools/train_tiny_hybrid.py --evaluate     # measure the checkpoint that is there

The seed fixes the weights that it starts from and every sample that it sees. Sums in float32 depend on the number of
threads, so two machines get models that behave alike, not files that are equal byte for byte.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from kvarve.reference.engine.layers import compute
from kvarve.reference.engine.recall import KEYS, VALUES, RecallTask, recall_task, score

HERE = Path(__file__).resolve().parent.parent / "src/kvarve/reference/engine/builtin/tiny-hybrid"

MERGED_VOCAB = 1536  # 256 bytes and what they merge into; the words of the task and the special tokens come after
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# An answer is written with one space before it, whether the caller sends it back with that space or without: the
# words are tokens with a space, and so the second turn's prompt begins with exactly the tokens of the first.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|> ' + message['content'] | trim + '<|end|>' -}}
{%- elif message['role'] == 'user' or message['role'] == 'system' -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- else -%}
{{- raise_exception('tiny-hybrid knows the roles system, user and assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


# ---------------------------------------------------------------------------------------------------- the tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of the manual, lossless for any text, in which each word of the task is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED_VOCAB, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = trained["vocab"]
    for word in ("What", "Ġcode", *(f"Ġ{word}" for word in KEYS + VALUES)):  # Ġ is how BPE files spell a space
        vocab.setdefault(word, len(vocab))
    # ignore_merges: a word that is in the vocabulary is one token though no merges lead to it.
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# -------------------------------------------------------------------------------------------------------- the model


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Random weights. Tied embeddings and a small initial range matter: without either it does not learn to recall."""
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=0.02,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        # To match a key, layers must hand it on from two or three tokens back, whatever the token in between. At random
        # weights they hand it on times a gate, and times a query-key product, whose signs depend on that token: with
        # 128 values that was the plateau on which training stood still. A component that all embeddings share (it
        # cancels in the logits) lets gates begin open; keys that begin as the queries make the product positive.
        model.model.embed_tokens.weight.add_(0.03)
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                linear = layer.linear_attn
                linear.in_proj_z.weight.add_(2.5 / config.hidden_size)
                query, key = linear.in_proj_qkv.weight[: linear.key_dim], linear.in_proj_qkv.weight[linear.key_dim :]
                key[: linear.key_dim] = query
                # Heads that forget within a token or three, as the library's own start does, only not by chance. With
                # heads that remember (tried: 10 to 1,000 tokens) the recurrent state learns to do the recall alone: up
                # to some 30 facts it succeeds, beyond that it cannot, and by then nothing makes attention learn it.
                linear.A_log.copy_(torch.tensor([0.5, 1.0, 2.0, 6.0]).log())
                linear.dt_bias.fill_(1.0)
            else:
                # Attention starts as a copy: the path from an attended token to predicting the same token exists from
                # the start, so only where to attend is left to learn.
                torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight, gain=0.3)
                layer.self_attn.o_proj.weight.copy_(layer.self_attn.v_proj.weight.T)
    return model


# ------------------------------------------------------------------------------------------------------ the samples


@dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum: from facts side by side to facts lost in a long text."""

    until: float  # the share of all steps at which it ends; it ends sooner once LEARNED of its answers are right
    rows: int  # tokens of context in one step
    context: tuple[int, int]  # tokens before the first question
    facts: tuple[int, int]


PHASES = (
    Phase(until=0.25, rows=1000, context=(16, 64), facts=(2, 8)),
    Phase(until=0.50, rows=1500, context=(50, 300), facts=(6, 32)),
    Phase(until=0.75, rows=2500, context=(250, 1200), facts=(16, 64)),
    Phase(until=1.00, rows=3600, context=(1200, 3600), facts=(32, 96)),
)
LEARNED = 0.95  # as a mean over about 20 steps
STEPS = 1200
MATRIX_RATE, OTHER_RATE = 6e-3, 3e-3


@dataclass(frozen=True)
class Sample:
    """Token ids, and where among them the answers stand: ids[answers[i]] is what the model has to say."""

    ids: list[int]
    answers: list[int]


def conversation(task: RecallTask, rng: random.Random) -> tuple[str, list[int]]:
    """A task with all its questions answered as one string, and the places in it of the answers' first letters.

    Three of seven are plain text. The chats have the context before the first question, in a message before it, or
    in a system message, and ask in either form, as clients may do any of these.
    """
    kind = rng.choice(("plain", "plain", "plain", "with", "with", "before", "system"))
    opening = {"plain": "", "with": "<|user|>", "before": "<|user|>", "system": "<|system|>"}[kind]
    text = opening + task.context + ("<|end|>" if kind in ("before", "system") else "")
    places = []
    for turn, question in enumerate(task.questions):
        if kind == "plain":
            text += f"{question.plain} "
        else:
            asked = question.chat if rng.random() < 0.75 else question.plain
            text += ("" if kind == "with" and turn == 0 else "<|user|>") + f"{asked}<|end|><|assistant|> "
        places.append(len(text))
        text += question.answer + (".\n" if kind == "plain" else "<|end|>")
    return text, places


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, phase: Phase) -> Iterator[list[Sample]]:
    """Batches of a phase without end. The tasks have seeds above 2**32: the ones people use stay unseen."""
    rng = random.Random(f"{seed} {phase}")
    while True:
        tokens = rng.randint(*phase.context)  # one length for all rows: nearly no padding
        batch = []
        for _ in range(max(1, phase.rows // tokens)):
            facts = min(rng.randint(*phase.facts), tokens // 8)
            asked = rng.randint((facts + 1) // 2, facts)
            seed_of_task = rng.randrange(1 << 32, 1 << 62)
            task = recall_task(seed_of_task, tokens=tokens, facts=facts, questions=min(asked, 48))
            text, places = conversation(task, rng)
            encoded = tokenizer.backend_tokenizer.encode(text)
            batch.append(Sample(encoded.ids, [encoded.char_to_token(place) for place in places]))
        yield batch


# ----------------------------------------------------------------------------------------------------- the training


def batch_loss(
    model: Qwen3_5ForCausalLM, batch: Sequence[Sample], rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(loss on the answers, loss on a tenth of all other tokens, share of answers that are right).

    Rows are padded at their end with token 0: every layer only looks back, so nothing that counts can see it.
    """
    width = max(len(sample.ids) for sample in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    weight = torch.zeros(len(batch), width)
    is_answer = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weight[row, 1 : len(sample.ids)] = 1
        is_answer[row, sample.answers] = True
    chosen = (torch.rand(weight.shape, generator=rng) < 0.1) & weight.bool() & ~is_answer
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    answers, others = is_answer[:, 1:], chosen[:, 1:]
    logits = model.lm_head(hidden[answers])
    right = (logits.argmax(-1) == ids[:, 1:][answers]).float().mean().item()
    text_loss = F.cross_entropy(model.lm_head(hidden[others]), ids[:, 1:][others])
    return F.cross_entropy(logits, ids[:, 1:][answers]), text_loss, right


def train(
    model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, minutes: float
) -> None:
    """Train in place. Progress, which sets phase and learning rate, is by steps, or by the clock if that is further."""
    # Muon (https://kellerjordan.github.io/posts/muon) for the matrices inside: AdamW alone took 4 times the steps.
    embedding = model.model.embed_tokens.weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    optimizers = (
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )
    streams = [batches(tokenizer, seed, phase) for phase in PHASES]
    rng = torch.Generator().manual_seed(seed)
    started, seen, number, recent = time.monotonic(), 0, 0, [0.0, 0.0, 0.0]
    model.train()
    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - started) / (60 * minutes))
        if progress >= 1:
            break
        if progress >= PHASES[number].until or (recent[2] > LEARNED and number + 1 < len(PHASES)):
            number, recent[2] = number + 1, 0.0
        batch = next(streams[number])
        answer_loss, text_loss, right = batch_loss(model, batch, rng)
        (answer_loss + 0.2 * text_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 50) * (0.03 + 0.97 * (0.5 + 0.5 * math.cos(math.pi * progress)))
        for optimizer, peak in zip(optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += sum(len(sample.ids) for sample in batch)
        now = (answer_loss.item(), text_loss.item(), right)
        recent = [old + (new - old) / min(step + 1, 20) for old, new in zip(recent, now, strict=True)]
        if step % 20 == 19 or step == steps - 1:
            elapsed = time.monotonic() - started
            print(
                f"{elapsed / 60:5.1f} min  step {step + 1:5d}/{steps}  phase {number + 1}  answers {recent[0]:.3f}"
                f"  right {recent[2]:.3f}  text {recent[1]:.3f}  {seen / elapsed:,.0f} tok/s",
                flush=True,
            )
    model.eval()


# --------------------------------------------------------------------------------------------------- the checkpoint


def save(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write an ordinary checkpoint folder. The weights are rounded to bfloat16, half the size; they load as float32."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"]),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # the safetensors library makes its files private


# -------------------------------------------------------------------------------------------------- the measurement

FORMS = ("completion", "chat", "chat, context in its own message", "chat, context as system message")


@dataclass
class Session:
    """One conversation with the model: its cache, and the ids that the cache has seen."""

    model: Qwen3_5ForCausalLM
    cache: DynamicCache
    seen: list[int]

    def answer(self, ids: list[int], stop: set[int], *, chunk: int = 256, most: int = 3) -> list[int]:
        """Prefill what `ids` add to the turns before, `chunk` tokens at a time, and decode greedily."""
        if ids[: len(self.seen)] != self.seen:  # a previous answer was wrong, so the history differs: start over
            self.cache, self.seen = DynamicCache(config=self.model.config), []
        said: list[int] = []
        while True:
            for start in range(len(self.seen), len(ids), chunk):
                part = torch.tensor([ids[start : start + chunk]])
                logits = compute(self.model, self.cache, input_ids=part, logits_to_keep=1).logits
            self.seen = ids
            token = int(logits[0, -1].argmax())
            if token in stop:
                return said
            said.append(token)
            if len(said) == most:
                return said
            ids = [*ids, token]


def encode_turn(tokenizer: PreTrainedTokenizerFast, form: str, task: RecallTask, answers: list[str]) -> list[int]:
    """The ids of the turn after `answers`, in one of FORMS."""
    if form == "completion":
        return list(tokenizer.encode(task.plain(answers)))
    messages = task.messages(answers)
    if form != "chat":
        role = "system" if "system" in form else "user"
        first = {"role": "user", "content": task.questions[0].chat}
        messages = [{"role": role, "content": task.context}, first, *messages[1:]]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def evaluate(checkpoint: Path, *, count: int, facts: int, first_seed: int = 1_000_000) -> None:
    """Load the folder as anyone would, ask three questions about each of `count` unseen contexts, print the scores."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    stop = set(model.generation_config.eos_token_id)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\n{checkpoint.name}: {parameters:,} parameters as {model.dtype}, {facts} facts, {count} contexts each")
    chars, tokens, seconds = 0, 0, 0.0
    for form in FORMS:
        lengths: list[int] = []
        asked: list[list[tuple[str, str]]] = [[], [], []]
        for seed in range(first_seed, first_seed + count):
            length = random.Random(seed).randint(2400, 3400)
            task = recall_task(seed, tokens=length, facts=facts, questions=len(asked))
            session = Session(model, DynamicCache(config=model.config), [])
            answers: list[str] = []
            for turn, question in enumerate(task.questions):
                ids = encode_turn(tokenizer, form, task, answers)
                started = time.monotonic()
                said = session.answer(ids, stop)
                if turn == 0:
                    seconds += time.monotonic() - started
                    tokens += len(ids)
                    chars += len(task.plain())
                    lengths.append(len(ids))
                answers.append(tokenizer.decode(said, skip_special_tokens=True))
                asked[turn].append((answers[-1], question.answer))
        shares = [score([said for said, _ in turn], [right for _, right in turn]) for turn in asked]
        shown = "  ".join(f"turn {number}: {share:.3f}" for number, share in enumerate(shares, 1))
        print(f"{form:33s} {min(lengths):,} to {max(lengths):,} tokens   {shown}", flush=True)
    print(f"{chars / tokens:.2f} characters per token; {tokens / seconds:,.0f} tok/s with prefill in chunks of 256")


@torch.inference_mode()
def ablate(checkpoint: Path, *, count: int, facts: int) -> None:
    """Print which state an answer depends on: wipe one kind of state between the context and the question, then ask."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    stop = set(model.generation_config.eos_token_id)
    for wiped in ("nothing", "attention keys and values", "recurrent and convolution states"):
        said, right = [], []
        for seed in range(2_000_000, 2_000_000 + count):
            task = recall_task(seed, tokens=2800, facts=facts, questions=1)
            session = Session(model, DynamicCache(config=model.config), [])
            session.answer(tokenizer.encode(task.context), stop, most=1)
            for layer in session.cache.layers:
                if wiped.startswith("attention") and hasattr(layer, "keys"):
                    layer.keys.zero_()
                    layer.values.zero_()
                elif wiped.startswith("recurrent") and hasattr(layer, "recurrent_states"):
                    for state in (*layer.recurrent_states.values(), *layer.conv_states.values()):
                        state.zero_()
            said.append(tokenizer.decode(session.answer(tokenizer.encode(task.plain()), stop)))
            right.append(task.questions[0].answer)
        print(f"wiped before the question: {wiped:33s} right {score(said, right):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, write and measure builtin:tiny-hybrid.")
    parser.add_argument("--out", type=Path, default=None, help=f"the checkpoint folder (default: {HERE})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="finish the schedule in this time if steps are slow"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--facts", type=int, default=48, help="facts per context when measuring")
    parser.add_argument("--samples", type=int, default=64, help="contexts per form when measuring")
    parser.add_argument("--quick", action="store_true", help="40 steps and 2 samples into out/, to see that it works")
    parser.add_argument("--evaluate", action="store_true", help="measure the folder that is there, train nothing")
    args = parser.parse_args()
    out = args.out or (Path("out/tiny-hybrid-quick") if args.quick else HERE)
    steps, count = (40, 2) if args.quick else (args.steps, args.samples)
    torch.set_num_threads(args.threads)
    if not args.evaluate:
        # A state that has decayed to 1e-40 slows a CPU down many times and is worth nothing.
        torch.set_flush_denormal(True)
        torch.manual_seed(args.seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, tokenizer, seed=args.seed, steps=steps, minutes=args.minutes)
        save(model, tokenizer, out)
        torch.set_flush_denormal(False)
    evaluate(out, count=count, facts=args.facts)
    ablate(out, count=count, facts=args.facts)


if __name__ == "__main__":
    main()
