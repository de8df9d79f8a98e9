"""IsolatedTokenizer: handles the texts of requests in text processes, so that no text can hold up or end the server.

Tokens of streams become text in this process: streams outlive a text process, and the cost of a tokenizer.json's
decoders is bounded when it is loaded. The text process loads the files first, so files that cannot be loaded within its
limits never reach the server.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from penstock.client.text_worker import TextWorker
from penstock.errors import check_unicode
from penstock.interface.structured_outputs import StructuredOutputsParams
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.tokenizer.hf import load_tokenizer

LONG_TEXT = 4096  # characters; longer texts have a process of their own, so that short texts do not wait for them
MAX_FITTING = 1024
MANY_IDS = 64  # more ids than this are decoded in the text process, because the text is long


class IsolatedTokenizer:
    """The tokenizer of a model directory: a thread-safe `Tokenizer` whose calls may block, each for a limited time.

    The constructor starts the first process; nothing else may be called before `load`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._short = TextWorker(folder)
        self._long = TextWorker(folder, at_once=False)
        self._forms = TextWorker(folder, at_once=False)  # a form that is cut off must not hold up tokenising
        self._fitting: OrderedDict[bytes, None] = OrderedDict()  # digests of checked forms

    def load(self) -> None:
        """Load the files in the text process, then in this process.

        Raises:
            ModelLoadError: a file is missing or damaged, or takes too much time or memory.
        """
        self._short.load()
        local = self._local = load_tokenizer(self._folder)
        self.bos_token_id, self.eos_token_id = local.bos_token_id, local.eos_token_id
        self.special_ids = local.special_ids
        self.joins_bytes = local.joins_bytes
        self.byte_fallback_ids = local.byte_fallback_ids
        template = None if local.chat_template is None else _IsolatedTemplate(self, local.chat_template.text)
        self.chat_template = cast(ChatTemplate | None, template)

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text, with one call."""
        for text in texts:
            check_unicode(text)
        options = {"add_special_tokens": add_special_tokens}
        found: list[list[int]] = self.call("encode_all", [list(texts)], options, num_chars=sum(map(len, texts)))
        return found

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        if len(ids) <= MANY_IDS:
            return self._local.decode(ids, **options)
        return str(self.call("decode", [list(ids)], options, num_chars=8 * len(ids)))

    def token_to_text(self, token_id: int) -> str:
        return self._local.token_to_text(token_id)

    def token_to_bytes(self, token_id: int) -> bytes:
        return self._local.token_to_bytes(token_id)

    def check_form(self, form: StructuredOutputsParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError for a form of answers that cannot be followed, or takes too long to compile."""
        digest = blake2b(repr(form.key).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest not in self._fitting:
            self._forms.call("check_form", [asdict(form), vocab_size, list(eos_token_ids)], {}, num_chars=0)
            self._fitting[digest] = None
            if len(self._fitting) > MAX_FITTING:
                self._fitting.popitem(last=False)

    def call(self, function: str, args: list[Any], options: dict[str, Any], *, num_chars: int) -> Any:
        """Call a function in the process for texts of this length; see TextWorker.call."""
        worker = self._short if num_chars <= LONG_TEXT else self._long
        return worker.call(function, args, options, num_chars=num_chars)

    def close(self) -> None:
        """End the text processes. A second call does nothing."""
        self._short.close()
        self._long.close()
        self._forms.close()


class _IsolatedTemplate:
    """Renders as ChatTemplate does, in a text process."""

    def __init__(self, tokenizer: IsolatedTokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self.text = text

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        num_chars = len(repr(messages)) + len(repr(options))
        return str(self._tokenizer.call("render", [list(messages)], options, num_chars=num_chars))
