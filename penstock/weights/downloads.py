"""Talk to the Hugging Face hub: what a repository holds, and downloads that go on where they were interrupted.

Everything lands in Hugging Face's own cache, in the layout of huggingface_hub, so other programs find it there. The
environment variables of that library apply: HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME and HF_HUB_CACHE (the place of
the cache) and HF_HUB_OFFLINE. The library keeps whole files only, so a file is fetched here first, into the place where
it looks for it: huggingface_hub then finds the file complete and adds what belongs to it.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, one_line, shown

BROKEN = ".penstock.incomplete"  # the end of the name of a file that is not complete
GIB = 2**30

Advance = Callable[[int], None]
Watch = Callable[[int, int], AbstractContextManager[Advance]]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        digest: SHA-256 of its content, which names it in the cache; None for a small file, which git keeps itself.
    """

    name: str
    size: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on the hub at one commit."""

    name: str
    commit: str
    files: tuple[RemoteFile, ...]

    def chosen(self, patterns: Sequence[str], ignored: Sequence[str] | None) -> list[RemoteFile]:
        """List the files that match one of the patterns and none of the ignored ones."""
        from huggingface_hub.utils import filter_repo_objects

        key: Callable[[RemoteFile], str] = lambda file: file.name  # noqa: E731
        return list(filter_repo_objects(self.files, allow_patterns=patterns, ignore_patterns=ignored, key=key))


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raise a ModelLoadError of one line, which says what to do, for what huggingface_hub raises in the block."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        advice = f"accept its conditions at {constants.ENDPOINT}/{name}, and set HF_TOKEN to a token of that account"
        raise ModelLoadError(f"model: {name} is gated: {advice}") from None
    except errors.RepositoryNotFoundError:
        advice = "check the name; if it is private, set HF_TOKEN"
        raise ModelLoadError(f"model: {constants.ENDPOINT} has no model {name}: {advice}") from None
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        answer = getattr(error, "response", None)
        if getattr(answer, "status_code", None) == 401:
            raise ModelLoadError(f"model: {constants.ENDPOINT} refuses the token: check HF_TOKEN") from None
        if constants.HF_HUB_OFFLINE:
            message = f"model: {name} is not complete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids fetching"
            raise ModelLoadError(message) from None
        raise ModelLoadError(
            f"model: there is no directory {shown(name)}, and the hub download failed: {one_line(error)}"
        ) from None


def snapshot(name: str, patterns: Sequence[str], ignored: Sequence[str] | None, *, is_local: bool = False) -> Path:
    """Fetch the files of a repository that the cache lacks, and return the directory of all of them.

    is_local: take what the cache has, without the network.

    Raises:
        ModelLoadError: there is no such repository, or the download fails.
    """
    with hub_errors(name):
        from huggingface_hub import snapshot_download

        local = {"local_files_only": True} if is_local else {}
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=ignored, **local))


def list_repository(name: str) -> Repository:
    """Ask the hub which files a repository has.

    Raises:
        ModelLoadError: there is no such repository, or the hub cannot be reached.
    """
    with hub_errors(name):
        from huggingface_hub import HfApi

        found = HfApi().model_info(name, files_metadata=True)
    files = [
        RemoteFile(item.rfilename, item.size or 0, None if item.lfs is None else str(item.lfs.sha256))
        for item in found.siblings or ()
    ]
    return Repository(name, str(found.sha), tuple(files))


def fetch(repository: Repository, files: Sequence[RemoteFile], watch: Watch) -> None:
    """Download large files into the cache. What an earlier attempt left is continued, and checked then.

    Files above the limit of plain HTTP, and small ones, are left to huggingface_hub.

    Args:
        watch: shows the progress: a context manager for (all bytes, bytes that are here), which yields a function for
            the bytes that arrive.

    Raises:
        ModelLoadError: the download fails, or the disk is too small.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository.name, repo_type="model") / "blobs"
    large = [file for file in files if file.digest and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE]
    missing = [(file, folder / str(file.digest)) for file in large if not (folder / str(file.digest)).exists()]
    if not missing:
        return
    with hub_errors(repository.name):
        folder.mkdir(parents=True, exist_ok=True)
        total, free = sum(file.size for file, _ in missing), shutil.disk_usage(folder).free
        here = sum(part.stat().st_size for _, blob in missing if (part := Path(f"{blob}{BROKEN}")).exists())
        if total - here > free:
            sizes = f"{(total - here) / GIB:.1f} GiB are to be fetched, but {free / GIB:.1f} GiB are free in {folder}"
            raise ModelLoadError(f"model: {repository.name}: {sizes}; HF_HUB_CACHE names another place")
        with watch(total, here) as advance:
            for file, blob in missing:
                _fetch_one(repository, file, blob, advance)


def _fetch_one(repository: Repository, file: RemoteFile, blob: Path, advance: Advance) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial = Path(f"{blob}{BROKEN}")
    with partial.open("a+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # another process may be fetching it
        if blob.exists():
            return
        begun = opened.seek(0, os.SEEK_END)
        if begun > file.size:
            begun = opened.truncate(0)
        url = hf_hub_url(repository.name, file.name, revision=repository.commit)
        bar: Any = type("Bar", (_Bar,), {"advance": staticmethod(advance)})
        http_get(url, opened, resume_size=begun, headers=build_hf_headers(), expected_size=file.size, tqdm_class=bar)
        opened.flush()
        if begun and _digest(opened) != file.digest:
            partial.unlink()
            raise ModelLoadError(f"model: {repository.name}: {file.name} arrived damaged; fetch it again")
        partial.rename(blob)


class _Bar:
    """Stands for a progress bar of tqdm, which huggingface_hub makes; a subclass says where the bytes are shown."""

    advance: Advance

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take tqdm's arguments."""

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar to its owner."""

    def update(self, num_bytes: float = 1) -> None:
        self.advance(int(num_bytes))


def _digest(file: BufferedRandom) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
