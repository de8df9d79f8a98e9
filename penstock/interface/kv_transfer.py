"""Prefill and decoding on different engines: the options, the messages between servers, and the counters."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.errors import check_choice, check_str, fail, invalid, string_tuple

ROLES = ("prefill", "decode")
MAX_URLS = 64
MAX_BATCH = 64  # blocks in one answer


@dataclass(frozen=True, slots=True)
class KVTransferOptions:
    """Options that say whether this engine computes prompts for other engines, or has its prompts computed elsewhere.

    Attributes:
        kv_role: "prefill" gives its blocks to other engines, "decode" gets them; None computes everything itself.
        kv_prefill_urls: servers with the role prefill, for the role decode.
        kv_prefill_api_key: the API key that these servers require.
    """

    kv_role: str | None = None
    kv_prefill_urls: tuple[str, ...] = ()
    kv_prefill_api_key: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError if an option is wrong."""
        if self.kv_role is not None:
            check_choice("kv_role", self.kv_role, ROLES)
        urls = string_tuple("kv_prefill_urls", self.kv_prefill_urls, max_items=MAX_URLS, max_length=1024)
        object.__setattr__(self, "kv_prefill_urls", tuple(url.rstrip("/") for url in urls))
        check_str("kv_prefill_api_key", self.kv_prefill_api_key, optional=True)
        if (self.kv_role == "decode") != bool(self.kv_prefill_urls):
            raise invalid("kv_prefill_urls", "kv_role = decode needs at least one, and no other role takes any")
        for url in self.kv_prefill_urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise fail("kv_prefill_urls", url, "the URL of a server, like http://10.0.0.5:8000")

    def check_directory(self, kv_offload_dir: str | None) -> None:
        """Raise InvalidRequestError if a role is set and the engine has no directory for its blocks."""
        if self.kv_role is not None and kv_offload_dir is None:
            raise invalid(
                "kv_offload_dir", "a kv_role needs a directory for blocks, at best in memory, like /dev/shm/penstock"
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """A line of the answer to POST /v1/kv/prefill.

    Attributes:
        num_blocks: leading blocks of the prompt that can be fetched.
        done: whether no more blocks will come.
        error: the reason if some blocks will not come.
    """

    num_blocks: int
    done: bool = False
    error: str | None = None


@dataclass(slots=True)
class RemotePrefillStatus:
    """Counts of the prompts and blocks handed over since the start.

    Attributes:
        num_transferring: prompts that wait now for the blocks of a server, the transfer backlog.
        num_prompts: prompts for which a server was asked.
        num_failures: times that a server could not be reached, or broke off.
        num_blocks, num_bytes: what was fetched, without blocks in a directory shared with the server.
    """

    num_transferring: int = 0
    num_prompts: int = 0
    num_failures: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
