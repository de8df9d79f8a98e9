"""Fill in the middle: how a model is asked for the text between a prefix and a suffix.

Models of code are trained with tokens of their own for it, which a tokenizer shows that has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.tokenizer.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer

# The tokens before the prefix, before the suffix and at the end of the prompt.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder 2, Granite Code
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)
# The tokens before the name of a repository, and before each of its files, of those models that know them.
REPOSITORIES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))  # Qwen 2.5 Coder; StarCoder 2
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
        repository, file: the tokens before their names; None: the model has none.
    """

    prefix: int
    suffix: int
    middle: int | None
    stop_token_ids: tuple[int, ...]
    repository: int | None = None
    file: int | None = None

    def prompt(
        self, tokenizer: Tokenizer, before: str, after: str, *,
        add_special_tokens: bool, files: Sequence[tuple[str, str]] = (), room: int | None = None,
    ) -> list[int]:  # fmt: skip
        """Make the prompt that asks for the text between two others. The tokenizer's BOS comes first.

        Args:
            files: names and texts of other files, which come before.
            room: tokens that the prompt may have. What is farthest from the place to fill is left out: files from the
                first on, the beginning of the text before it, and the end of the text after it.
        """
        ids, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
        whole = tokenizer.encode(before, add_special_tokens=add_special_tokens)
        begin = whole[: len(whole) - len(ids)] if whole[len(whole) - len(ids) :] == ids else []
        if room is not None:
            room = max(0, room - len(begin) - 3)
            suffix = suffix[: max(room // 4, room - len(ids))]
            ids = ids[max(0, len(ids) + len(suffix) - room) :]
            begin += self._files(tokenizer, files, room - len(ids) - len(suffix))
        if self.middle is None:
            return [*begin, self.suffix, *suffix, self.prefix, *ids]
        return [*begin, self.prefix, *ids, self.suffix, *suffix, self.middle]

    def _files(self, tokenizer: Tokenizer, files: Sequence[tuple[str, str]], room: int) -> list[int]:
        """Write other files, the last ones that there is room for, and what announces the file to fill in."""

        def headed(token: int | None, name: str, text: str = "") -> list[int]:
            mark = [] if token is None else [token]
            return mark + tokenizer.encode(f"{name}\n{text}", add_special_tokens=False)

        first = [] if self.repository is None else headed(self.repository, "repository")
        last = [] if self.file is None else headed(self.file, "current")
        room -= len(first) + len(last)
        found: list[int] = []
        for name, text in reversed(files):
            if len(text) > MAX_CHARS_PER_TOKEN * room or len(ids := headed(self.file, name, text)) > room:
                break
            found, room = ids + found, room - len(ids)
        return [*first, *found, *last] if found else []


def fill_in_of(tokenizer: Tokenizer) -> FillIn | None:
    """Find the tokens in a tokenizer; None if it has none for filling in."""
    ends = {token_id for mark in ENDS if (token_id := _token(tokenizer, mark)) is not None}
    for marks in (*MARKS, SUFFIX_FIRST):
        found = [_token(tokenizer, mark) for mark in marks]
        known = [token_id for token_id in found if token_id is not None]
        if len(known) == len(marks):
            pairs = [[_token(tokenizer, mark) for mark in pair] for pair in REPOSITORIES]
            repository, file = next((pair for pair in pairs if None not in pair), (None, None))
            stops = ends.union(known, (token_id for token_id in (repository, file) if token_id is not None))
            middle = known[2] if len(known) == 3 else None
            return FillIn(known[0], known[1], middle, tuple(sorted(stops)), repository, file)
    return None


def _token(tokenizer: Tokenizer, mark: str) -> int | None:
    """Find the token that a mark is, if it is one."""
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and mark.strip("▁") in tokenizer.token_to_text(ids[0]) else None
