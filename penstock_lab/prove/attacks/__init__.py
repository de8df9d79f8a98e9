"""Attacks on a real server, by theme: tables of what is sent and of the correct answers."""

from penstock_lab.prove.attacks.attack import Attack
from penstock_lab.prove.attacks.clients import ACCESS, CROWDS, QUICK
from penstock_lab.prove.attacks.values import JSON_BODIES, PROMPTS, SAMPLING
from penstock_lab.prove.attacks.wire import HEADS, LINES, SMUGGLING

THEMES: dict[str, tuple[Attack, ...]] = {
    "sampling": SAMPLING,
    "prompts": PROMPTS,
    "json": JSON_BODIES,
    "access": ACCESS,
    "request lines": LINES,
    "smuggling": SMUGGLING,
    "heads": HEADS,
    "clients": QUICK,
}
ATTACKS = tuple(attack for theme in THEMES.values() for attack in theme)
SLOW_ATTACKS = CROWDS  # they take minutes, mostly waiting
