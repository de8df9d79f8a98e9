"""The further variables that a request may give to a chat template: which are allowed. No Jinja."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import fail, invalid

KWARGS = "chat_template_kwargs"  # vLLM's name for further variables of the template
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
    | {"conversation", KWARGS}
)
MAX_INTEGER = 2**63 - 1  # of a variable


def check_template_kwargs(kwargs: Mapping[str, Any], param: str = KWARGS) -> None:
    """Raise InvalidRequestError for variables of a template with a reserved name, at any depth, or a huge integer.

    The tokenizer's tokens (bos_token, ...) cannot be set either: a request could take them out of the prompt.
    """
    if not isinstance(kwargs, Mapping):
        raise fail(param, kwargs, 'an object like {"enable_thinking": false}')
    if tokens := [name for name in kwargs if isinstance(name, str) and name.endswith("_token")]:
        raise invalid(param, f"{min(tokens)} cannot be set here", "not_allowed")
    nodes: list[Any] = [kwargs]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            if names := RESERVED_NAMES.intersection(node):
                raise invalid(param, f"{min(names)} cannot be set here", "not_allowed")
            nodes.extend(node.values())
        elif isinstance(node, list | tuple):
            nodes.extend(node)
        elif isinstance(node, int) and abs(node) > MAX_INTEGER:
            raise fail(param, node, f"made of integers up to {MAX_INTEGER}")
