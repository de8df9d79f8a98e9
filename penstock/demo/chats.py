"""Conversations: tasks, stories and small talk as turns of (role, content), and how turns are written as text.

render() writes exactly what the model's chat template writes; a test compares the two. corpus.py decides how often each
kind occurs.
"""

from functools import cache
from random import Random

from penstock.demo import stories, sums, tasks

Turn = tuple[str, str]
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = ("<|pad|>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant.') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant", "You are Penstock's small demo model.",
    "You are a friendly assistant.", "You tell stories to children.", "You are kind and helpful.",
    "Answer in short sentences.", "Be brief.", "You are a good teacher.", "Help the user.",
    "You are a helpful, honest assistant.", "Use simple words.",
)  # fmt: skip
JSON_SYSTEM = (
    "You answer only with JSON.", "Answer with JSON only.", "Give every answer as JSON.",
    "You are a machine that writes JSON.",
)  # fmt: skip
STORY_ASKS = (
    "Tell me a story.", "Tell me a story", "Can you tell me a story?", "Write a story.", "Please tell me a story.",
    "I want a story.", "Tell a story for children.", "Tell me a bedtime story.", "Do you know a story?",
    "Once more a story, please.",
)  # fmt: skip
ABOUT_ASKS = (
    "Tell me a story about {}.", "Write a story about {}.", "Can you tell me a story about {}?",
    "I want a story about {}.", "A story about {}, please.", "Please write a short story about {}.",
    "Do you know a story about {}?", "Make up a story about {}.",
)  # fmt: skip
READ_ASKS = (
    "{story}\n\n{question}", "Read this story: {story}\n\n{question}",
    "Here is a story.\n\n{story}\n\nQuestion: {question}", "{story}\n\nAnswer this question: {question}",
    "Story: {story}\nQuestion: {question}",
)  # fmt: skip
UNKNOWN_ASKS = (
    "What is the capital of {x}?", "Who is the president of {x}?", "Explain {x}.", "What is {x}?",
    "How does {x} work?", "Tell me about {x}.", "Who invented {x}?", "Write an essay about {x}.",
    "Why is {x} important?", "When did {x} begin?", "Translate {x} into French.", "Write a program about {x}.",
    "What do you think about {x}?", "Where is {x}?", "How do I learn {x}?", "Is {x} dangerous?",
)  # fmt: skip
UNKNOWN_TOPICS = (
    "France", "Germany", "Japan", "Brazil", "Canada", "India", "China", "Spain", "Kenya", "Peru", "gravity",
    "electricity", "Python", "quantum physics", "the internet", "history", "the economy", "football", "chess",
    "mathematics", "a computer", "a neural network", "machine learning", "photosynthesis", "democracy",
    "the moon landing", "the Roman Empire", "climate change", "a black hole", "DNA", "music theory", "philosophy",
    "the stock market", "medicine", "a car engine", "Java", "the French Revolution", "evolution", "Einstein",
    "Shakespeare", "a transformer", "attention", "software", "a database", "the universe", "time travel", "money",
    "a volcano", "the law",
)  # fmt: skip
UNKNOWN_ANSWERS = (
    "I am sorry, I do not know that. I am very small and only know stories, sums and lists.",
    "That is too hard for me. I can tell you a story, add small numbers or make a list.",
    "I do not know that. Would you like a story?",
)


def render(turns: list[Turn]) -> str:
    """Return the conversation as the chat template writes it, without a generation prompt."""
    return BOS + "".join(f"<|{role}|>{content.strip()}{END}" for role, content in turns)


def render_prompt(turns: list[Turn]) -> str:
    """Return the conversation with a generation prompt."""
    return render(turns) + "<|assistant|>"


@cache
def smalltalk_blocks() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Return (questions, answers) of each block of smalltalk.txt."""
    text = (stories.HERE / "smalltalk.txt").read_text(encoding="utf-8")
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        blocks.append((tuple(lines[0].split(" | ")), tuple(line.removeprefix("= ") for line in lines[1:])))
    return tuple(blocks)


def typed(rng: Random, question: str) -> str:
    """Return the question as typed in a hurry: sometimes in lower case, sometimes without its last mark."""
    draw = rng.random()
    if draw < 0.08:
        question = question[0].lower() + question[1:]
    elif draw < 0.14:
        question = question.lower()
    if rng.random() < 0.08 and question[-1] in "?.!":
        question = question[:-1]
    return question


def ask(rng: Random, pair: tuple[str, str]) -> list[Turn]:
    """Return a question and its answer as two turns."""
    return [("user", typed(rng, pair[0])), ("assistant", pair[1])]


def smalltalk(rng: Random) -> list[Turn]:
    """Return a greeting or other small talk."""
    questions, answers = rng.choice(smalltalk_blocks())
    return ask(rng, (rng.choice(questions), rng.choice(answers)))


def unknown(rng: Random) -> list[Turn]:
    """Return a question that the model cannot answer, and a polite refusal."""
    question = rng.choice(UNKNOWN_ASKS).format(x=rng.choice(UNKNOWN_TOPICS))
    return ask(rng, (question, rng.choice(UNKNOWN_ANSWERS)))


def told_story(rng: Random, questions: int = 0) -> list[Turn]:
    """Return a request for a story, the story, and questions about it."""
    story = stories.tell(rng)
    hero = stories.article(story.kind)
    topics = (*story.topics, hero, f"{hero} named {story.hero}", story.hero)
    request = rng.choice(STORY_ASKS) if rng.random() < 0.35 else rng.choice(ABOUT_ASKS).format(rng.choice(topics))
    turns = ask(rng, (request, story.text))
    pairs = rng.sample(story.questions, min(questions, len(story.questions)))
    return turns + [turn for pair in pairs for turn in ask(rng, pair)]


def read_story(rng: Random) -> list[Turn]:
    """Return a story given by the user, and one to three questions about it."""
    story = stories.tell(rng, fullness=rng.choice((0.0, 0.0, 0.3, 0.6)))
    pairs = rng.sample(story.questions, min(rng.choice((1, 2, 3)), len(story.questions)))
    text = rng.choice(READ_ASKS).format(story=story.text, question=pairs[0][0])
    return [("user", text), ("assistant", pairs[0][1]), *(turn for pair in pairs[1:] for turn in ask(rng, pair))]


def json_task(rng: Random) -> list[Turn]:
    """Return a JSON task, sometimes with a system message that asks for JSON."""
    question, answer = tasks.json_answer(rng)  # never retyped: the values must be copied as they stand
    turns: list[Turn] = [("user", question), ("assistant", answer)]
    return [("system", rng.choice(JSON_SYSTEM)), *turns] if rng.random() < 0.2 else turns


def several(rng: Random) -> list[Turn]:
    """Return a longer conversation of short exchanges."""
    makers = (smalltalk, unknown, sum_task, list_task, fact_task, json_task)
    talks = [rng.choice(makers)(rng) for _ in range(rng.randint(2, 5))]
    return [turn for talk in talks for turn in talk if turn[0] != "system"]


def sum_task(rng: Random) -> list[Turn]:
    """Return one to four sums."""
    return [turn for _ in range(rng.choice((1, 1, 2, 4))) for turn in ask(rng, sums.question(rng))]


def list_task(rng: Random) -> list[Turn]:
    """Return a request for a list, and the list."""
    return ask(rng, tasks.listing(rng))


def fact_task(rng: Random) -> list[Turn]:
    """Return a question for a small fact, and the answer."""
    return ask(rng, tasks.fact(rng))


def repeat_task(rng: Random) -> list[Turn]:
    """Return one to three texts to repeat, word for word."""
    pairs = [tasks.repeat(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return [turn for question, answer in pairs for turn in (("user", question), ("assistant", answer))]


def with_system(rng: Random, turns: list[Turn], share: float = 0.25) -> list[Turn]:
    """Return the conversation, sometimes with a system message that changes nothing."""
    plain = turns[0][0] != "system" and rng.random() < share
    return [("system", rng.choice(SYSTEM)), *turns] if plain else turns
