"""Conversations: tasks, stories and small talk as turns of (role, content), and their rendering as text.

render() writes exactly what the model's chat template writes; a test compares the two. corpus.py defines how often each
kind occurs.
"""

from collections.abc import Callable
from functools import cache
from random import Random

from penstock_lab.training import stories, sums, tasks, words
from penstock_lab.training.words import PHRASES

Turn = tuple[str, str]
BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
SPECIAL_TOKENS = ("<|pad|>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END)
# The tool tags that Hermes and Qwen share. They are plain text in a turn, and one token each.
TOOL_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    # the tools, one JSON object per line, at the end of the system message
    "{{ bos_token }}{% set first = messages[0] %}"
    "{% if tools %}{{ '<|system|>' }}"
    "{% if first['role'] == 'system' and first['content'] %}{{ first['content'] | trim + '\n\n' }}{% endif %}"
    "{{ '<tools>\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '</tools><|end|>' }}{% endif %}"
    "{% for message in messages %}{% set role = message['role'] %}{% set content = (message['content'] or '') | trim %}"
    "{% if role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Roles are system, user, assistant and tool.') }}{% endif %}"
    "{% if role == 'tool' %}"  # the results of the calls of one turn share one user turn
    "{% if loop.first or loop.previtem['role'] != 'tool' %}{{ '<|user|>' }}{% else %}{{ '\n' }}{% endif %}"
    "{{ '<tool_response>\n' + content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|end|>' }}{% endif %}"
    "{% elif not (tools and loop.first and role == 'system') %}"
    "{{ '<|' + role + '|>' + content }}"
    "{% for call in message['tool_calls'] or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    "{% if call['function'] %}{% set call = call['function'] %}{% endif %}{% set given = call['arguments'] %}"
    "{{ '<tool_call>\n{\"name\": ' + call['name'] | tojson + ', \"arguments\": ' }}"
    "{{ (given if given is string else given | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(turns: list[Turn]) -> str:
    """Write the conversation as the chat template does, without a generation prompt."""
    return BOS + "".join(f"<|{role}|>{content.strip()}{END}" for role, content in turns)


def render_prompt(turns: list[Turn]) -> str:
    return render(turns) + "<|assistant|>"


@cache
def smalltalk_blocks() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Read (questions, answers) of each block of smalltalk.txt."""
    blocks = []
    for block in words.read_text("smalltalk.txt").strip().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        blocks.append((tuple(lines[0].split(" | ")), tuple(line.removeprefix("= ") for line in lines[1:])))
    return tuple(blocks)


def typed(rng: Random, question: str) -> str:
    """Spoil the question as if typed in a hurry: sometimes in lower case, sometimes without its final punctuation."""
    draw = rng.random()
    if draw < 0.08:
        question = question[0].lower() + question[1:]
    elif draw < 0.14:
        question = question.lower()
    if rng.random() < 0.08 and question[-1] in "?.!":
        question = question[:-1]
    return question


def ask(rng: Random, pair: tuple[str, str]) -> list[Turn]:
    return [("user", typed(rng, pair[0])), ("assistant", pair[1])]


def smalltalk(rng: Random) -> list[Turn]:
    questions, answers = rng.choice(smalltalk_blocks())
    return ask(rng, (rng.choice(questions), rng.choice(answers)))


def unknown(rng: Random) -> list[Turn]:
    """Ask a question that the model cannot answer; the answer is a polite refusal."""
    question = rng.choice(PHRASES["unknown_asks"]).format(x=rng.choice(PHRASES["unknown_topics"]))
    return ask(rng, (question, rng.choice(PHRASES["unknown_answers"])))


def requested_story(rng: Random, questions: int = 0) -> list[Turn]:
    story = stories.tell(rng)
    hero = stories.article(story.kind)
    topics = (*story.topics, hero, f"{hero} named {story.hero}", story.hero)
    request = (
        rng.choice(PHRASES["story_asks"])
        if rng.random() < 0.35
        else rng.choice(PHRASES["about_asks"]).format(rng.choice(topics))
    )
    turns = ask(rng, (request, story.text))
    pairs = rng.sample(story.questions, min(questions, len(story.questions)))
    return turns + [turn for pair in pairs for turn in ask(rng, pair)]


def somebody(rng: Random, story: stories.Story) -> str:
    """Name the hero of a story as a request does, sometimes with a deed or a fear."""
    kind = story.kind if rng.random() < 0.7 else f"{rng.choice(words.HERO_WORDS)} {story.kind}"
    hero = stories.article(kind) if rng.random() < 0.85 else f"the {kind}"
    if rng.random() < 0.25:
        hero += rng.choice((" named ", " called ")) + story.hero
    if rng.random() < 0.25:
        return hero
    deed = rng.choice(story.deeds)
    if rng.random() < 0.4:
        deed = rng.choice(PHRASES["fear_forms"]).format(rng.choice(PHRASES["fears"]))
    return hero + rng.choice((" who ", " who ", " who ", " that ")) + deed


def something(rng: Random) -> str:
    """Name one or two things that a story may be requested by, and that no plot has."""
    one, two = (rng.choice((rng.choice(words.COMMON), rng.choice(words.THINGS))) for _ in range(2))
    kind, color = rng.choice(words.KINDS), rng.choice(words.COLORS)
    place = rng.choice(words.PLACES)[0]
    forms = (
        one, f"the {one}", stories.article(one), f"{stories.article(one)} and {stories.article(two)}", f"two {kind}s",
        f"the {color} {one}", f"{stories.article(kind)} and {stories.article(one)}", f"{stories.article(kind)} {place}",
        f"{stories.article(one)} {place}", f"three friends and {stories.article(one)}", f"the {one} and the {two}",
    )  # fmt: skip
    return rng.choice(forms)


def asked_story(rng: Random) -> list[Turn]:
    """Ask for a story in one of many ways, some of them short or vague."""
    story = stories.tell(rng)
    word = rng.choice(PHRASES["story_words"])
    drawn = rng.random()
    if drawn < 0.3:
        form, about = rng.choice(PHRASES["free_asks"]), ""
    else:
        form = rng.choice(PHRASES["topic_asks" if rng.random() < 0.75 else "about_asks"])
        about = somebody(rng, story) if drawn < 0.7 else something(rng) if drawn < 0.9 else rng.choice(story.topics)
    request = form.format(about, s=word, a_s=stories.article(word), x=about, n=rng.randint(3, 9))
    return ask(rng, (stories.capital(request) if rng.random() < 0.8 else request, story.text))


def read_story(rng: Random) -> list[Turn]:
    """Give a story, and ask one to three questions about it."""
    story = stories.tell(rng, fullness=rng.choice((0.0, 0.0, 0.3, 0.6)))
    pairs = rng.sample(story.questions, min(rng.choice((1, 2, 3)), len(story.questions)))
    text = rng.choice(PHRASES["read_asks"]).format(story=story.text, question=pairs[0][0])
    return [("user", text), ("assistant", pairs[0][1]), *(turn for pair in pairs[1:] for turn in ask(rng, pair))]


def json_task(rng: Random) -> list[Turn]:
    """Ask for JSON, sometimes with a system message that asks for it too."""
    question, answer = tasks.json_answer(rng)  # not passed to typed(), because the values must be copied exactly
    turns: list[Turn] = [("user", question), ("assistant", answer)]
    return [("system", rng.choice(PHRASES["json_system"])), *turns] if rng.random() < 0.2 else turns


def several(rng: Random) -> list[Turn]:
    """Draw a longer conversation of short exchanges."""
    makers = (smalltalk, unknown, sum_task, list_task, fact_task, json_task)
    talks = [rng.choice(makers)(rng) for _ in range(rng.randint(2, 5))]
    return [turn for talk in talks for turn in talk if turn[0] != "system"]


def story_talk(rng: Random, request: Callable[[Random], list[Turn]] = requested_story) -> list[Turn]:
    """Draw a conversation in which stories are asked for between other short exchanges."""
    makers = (request, request, smalltalk, unknown, sum_task, list_task, fact_task)
    talks = [request(rng), *(rng.choice(makers)(rng) for _ in range(rng.randint(1, 3)))]
    rng.shuffle(talks)
    return [turn for talk in talks for turn in talk]


def sum_task(rng: Random) -> list[Turn]:
    return [turn for _ in range(rng.choice((1, 1, 2, 4))) for turn in ask(rng, sums.question(rng))]


def list_task(rng: Random) -> list[Turn]:
    return ask(rng, tasks.listing(rng))


def fact_task(rng: Random) -> list[Turn]:
    return ask(rng, rng.choice(tasks.FACTS)(rng))


def repeat_task(rng: Random) -> list[Turn]:
    """Ask one to three times to repeat a text word for word."""
    pairs = [tasks.repeat(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return [turn for question, answer in pairs for turn in (("user", question), ("assistant", answer))]


def with_system(rng: Random, turns: list[Turn], share: float = 0.25) -> list[Turn]:
    """Add, sometimes, a system message that changes nothing."""
    plain = turns[0][0] != "system" and rng.random() < share
    return [("system", rng.choice(PHRASES["system"])), *turns] if plain else turns
