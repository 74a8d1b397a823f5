"""A question whose answer a machine can score: facts scattered through a long text, then asked for one by one.

Text in, text out, and the seed decides everything: nothing here knows a tensor, a tokenizer or a server. The filler
is CPython's own reference manual (`pydoc_data.topics`), so a prompt looks like a document and needs no download; it
therefore differs a little from one Python release to the next, while the facts and the questions do not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pydoc_data.topics import topics
from typing import NamedTuple

from kvarve.errors import ConfigError

# Words that the manual does not use. Each, with the space before it, is one token of `builtin:tiny-hybrid`.
_KEY_WORDS = """
    acorn adder albatross alligator almond alpaca anchovy anteater antelope apricot armadillo artichoke
    asparagus aubergine avocado axolotl baboon badger barley basil bear beaver beetle beetroot bison blackberry
    blueberry boar bream broccoli buffalo bumblebee butterfly buzzard cabbage camel canary cardamom caribou carp
    carrot cashew cauliflower celery centipede chameleon cheetah cherry chestnut chicory chipmunk cinnamon clam
    clementine cobra cockatoo coconut condor coriander cormorant cougar courgette coyote crab cranberry cricket
    crocodile crow cuckoo cucumber curlew currant cuttlefish damselfly damson dandelion dolphin donkey dove
    dragonfly duck eagle earthworm echidna elderberry elephant emu falcon fennel ferret finch flamingo fox frog
    gannet garlic gazelle gecko gerbil gibbon ginger giraffe goat goose gorilla grasshopper grouse gull haddock
    halibut hamster hare hedgehog heron herring hippo hornet hyena ibis iguana jackal jaguar jay jellyfish
    kangaroo kestrel kiwi koala ladybird lamb lark lemming lemur leopard linnet lizard llama lobster locust lynx
    macaque macaw mackerel magpie mallard manatee mantis marlin marmot marten minnow mole moose mosquito moth
    mouse mule mussel narwhal newt ocelot octopus opossum orangutan orca osprey ostrich otter owl oyster panda
    pangolin panther partridge peacock pelican perch pheasant pigeon piglet pika pike pipit plaice platypus
    plover pony porcupine porpoise prawn puffin quail rabbit raccoon ram raven rhino roach robin rooster
    salamander salmon sardine scorpion seal shark sheep shrew shrimp skunk sloth slug snail snipe sparrow spider
    squid squirrel stallion starfish starling stoat stork swallow swan swift swordfish tapir teal tench termite
    tern terrapin thrush toad tortoise toucan trout tuna turbot turkey turtle urchin vicuna viper vole vulture
    wallaby walrus wasp weasel wolf wombat wren yak zebra
"""
_VALUE_WORDS = """
    accordion agate amber amethyst aquamarine argon azure banjo basalt bassoon beige beryl bronze burgundy
    cadmium cello cerulean chalk charcoal chartreuse chromium citrine clarinet clay cobalt copper coral crimson
    cyan cymbal dolomite ebony emerald feldspar flint flute fuchsia garnet gneiss gold gong granite graphite
    guitar gypsum harmonium harp helium hematite indigo iron ivory jade jasper khaki krypton lapis lilac
    limestone lithium lute magenta mahogany malachite mandolin marble marimba maroon mauve mica mustard neon
    nickel oboe obsidian ochre olive onyx opal orchid peach pearl pewter piano platinum plum porphyry pumice
    purple pyrite quartz rhodonite ruby russet rust saffron sandstone sapphire scarlet schist sepia shale silver
    slate sodium spinel sulphur talc taupe titanium topaz tourmaline travertine trombone trumpet tuba tungsten
    turquoise umber vermilion viola violet violin xenon xylophone yellow zinc zircon
"""
KEYS = tuple(_KEY_WORDS.split())
VALUES = tuple(_VALUE_WORDS.split())

# About what the tokenizer of builtin:tiny-hybrid gives here (`tools/train_tiny_hybrid.py --evaluate` prints it).
CHARS_PER_TOKEN = 3.35


class Question(NamedTuple):
    """A key of one fact of the context, and the word that the context gives it."""

    key: str
    answer: str

    @property
    def plain(self) -> str:
        """The beginning of a sentence, for a completion: what comes next is the answer, with a space before it."""
        return f"the code of {self.key} is"

    @property
    def chat(self) -> str:
        """The same as a question, for a chat message."""
        return f"What is the code of {self.key}?"


@dataclass(frozen=True)
class RecallTask:
    """A text with facts in it, and questions about some of them.

    `context` ends with a newline. Both forms of a conversation over it only ever grow at the end, so each turn's
    prompt begins with all of the turn before, as prefix caching needs.
    """

    seed: int
    context: str
    questions: tuple[Question, ...]

    def plain(self, answers: Sequence[str] = ()) -> str:
        """The prompt of the turn after `answers`, as one string for a completion."""
        # A completion goes on after its answer, so of each answer the first word counts.
        done = "".join(
            f"{question.plain} {_first_word(answer)}.\n"
            for question, answer in zip(self.questions, answers, strict=False)
        )
        return f"{self.context}{done}{self.questions[len(answers)].plain}"

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The messages of the turn after `answers`, for a chat; the context opens the first user message."""
        messages = [{"role": "user", "content": self.context + self.questions[0].chat}]
        for answer, following in zip(answers, self.questions[1:], strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": following.chat})
        return messages


def recall_task(seed: int, *, tokens: int = 2800, facts: int = 48, questions: int = 4) -> RecallTask:
    """A task of about `tokens` tokens, of which each fact takes about 8; the same seed gives the same text.

    Raises ConfigError when there are more questions than facts, or more facts than there are keys to tell apart.
    """
    if not 1 <= questions <= facts <= len(KEYS):
        raise ConfigError(f"1 <= questions <= facts <= {len(KEYS)} must hold, got {questions} questions, {facts} facts")
    rng = random.Random(seed)
    known = [Question(key, rng.choice(VALUES)) for key in rng.sample(KEYS, facts)]
    sentences = [f"{fact.plain} {fact.answer}.\n" for fact in known]
    lines = _filler(rng, round(tokens * CHARS_PER_TOKEN) - sum(map(len, sentences)))
    for sentence in sentences:
        lines.insert(rng.randint(0, len(lines)), sentence)
    return RecallTask(seed, "".join(lines), tuple(rng.sample(known, questions)))


def score(answers: Sequence[str], expected: Sequence[str]) -> float:
    """The share of answers whose first word is the expected one, whatever the model says after it.

    Raises ConfigError when the two do not pair up.
    """
    if not expected or len(answers) != len(expected):
        raise ConfigError(f"each question needs an answer, got {len(answers)} for {len(expected)} questions")
    right = sum(_first_word(answer) == word for answer, word in zip(answers, expected, strict=True))
    return right / len(expected)


def _first_word(text: str) -> str:
    words = text.split()
    return words[0].strip(".,!?") if words else ""


def _filler(rng: random.Random, chars: int) -> list[str]:
    """Consecutive lines of the manual from a random place on, `chars` characters or a part of a line more."""
    manual = _manual()
    at = rng.randrange(len(manual))
    lines: list[str] = []
    while chars > 0:
        lines.append(manual[at % len(manual)])
        chars -= len(lines[-1])
        at += 1
    return lines


@lru_cache(maxsize=1)
def _manual() -> tuple[str, ...]:
    """Every line of the manual that is not empty and uses none of our words."""
    ours = set(KEYS) | set(VALUES)
    lines = (line.rstrip() for name in sorted(topics) for line in topics[name].splitlines())
    return tuple(line + "\n" for line in lines if line and ours.isdisjoint(line.lower().split()))
