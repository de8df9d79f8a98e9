"""Fill in the middle: how a model is asked for the text between a prefix and a suffix.

Models of code are trained with tokens of their own for it, which a tokenizer shows that has them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.tokenizer.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix and at the end of the prompt.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder 2, Granite Code
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)
SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")  # Codestral: the suffix comes first, and nothing at the end
# Tokens that may follow the answer.
ENDS = ("▁<EOT>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|EOT|>")


@dataclass(frozen=True, slots=True)
class FillIn:
    """The tokens of a model for it.

    Attributes:
        prefix, suffix: the tokens before the two texts. middle: the token at the end of the prompt; None: the suffix
            comes first, and the prefix is the end.
        stop_token_ids: tokens that do not belong to the text between them.
    """

    prefix: int
    suffix: int
    middle: int | None
    stop_token_ids: tuple[int, ...]

    def prompt(self, tokenizer: "Tokenizer", before: str, after: str, *, add_special_tokens: bool) -> list[int]:
        """Make the prompt that asks for the text between two others. The tokenizer's BOS comes first."""
        ids, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
        whole = tokenizer.encode(before, add_special_tokens=add_special_tokens)
        begin = whole[: len(whole) - len(ids)] if whole[len(whole) - len(ids) :] == ids else []
        if self.middle is None:
            return [*begin, self.suffix, *suffix, self.prefix, *ids]
        return [*begin, self.prefix, *ids, self.suffix, *suffix, self.middle]


def fill_in_of(tokenizer: "Tokenizer") -> FillIn | None:
    """Find the tokens in a tokenizer; None if it has none for filling in."""
    ends = {token_id for mark in ENDS if (token_id := _token(tokenizer, mark)) is not None}
    for marks in (*MARKS, SUFFIX_FIRST):
        found = [_token(tokenizer, mark) for mark in marks]
        known = [token_id for token_id in found if token_id is not None]
        if len(known) == len(marks):
            return FillIn(known[0], known[1], known[2] if len(known) == 3 else None, tuple(sorted({*known, *ends})))
    return None


def _token(tokenizer: "Tokenizer", mark: str) -> int | None:
    """Find the token that a mark is, if it is one."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and mark.strip("▁") in tokenizer.token_to_text(ids[0]) else None
