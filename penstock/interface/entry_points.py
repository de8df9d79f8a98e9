"""Find what other installed packages add to the engine, as entry points. The engine imports none of them by name.

    penstock.commands               a package of commands: COMMANDS, {name: help}, and a module for each name
    penstock.calling_conventions    a module for models with another calling convention: `build` and `adapt`
    penstock.model_versions         {architecture: {a value of `model_impl`: ModelVersion}}
    penstock.launchers              open_launcher(config, option): starts the ranks of a model elsewhere
    penstock.servers                serve_here(options, replicas, client): a server whose engines run elsewhere
    penstock.executors              an executor without a model, for `--load-format mock`
    penstock.profilers              a context manager that measures what an LLM computes, and prints it

`penstock_lab` adds the ones that come with Penstock; the table is in pyproject.toml.
"""

from typing import TYPE_CHECKING, Any

from penstock.errors import EXTRAS, invalid, missing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def names(group: str) -> list[str]:
    """List the names of all entry points of a group, such as "commands"."""
    from importlib.metadata import entry_points  # takes 30 ms, for which most commands need not wait

    return sorted({entry.name for entry in entry_points(group=f"penstock.{group}")})


def load(group: str, name: str, option: str) -> Any:
    """Load the object that an entry point names.

    option: the option that asks for it, for error messages.

    Raises:
        InvalidRequestError: it is not installed, or a library that it needs is not.
    """
    from importlib.metadata import entry_points

    entry = next(iter(entry_points(group=f"penstock.{group}", name=name)), None)
    if entry is None:
        raise invalid(option, f"no installed package provides {name!r} (an entry point of the group penstock.{group})")
    try:
        return entry.load()
    except ImportError as error:
        raise _missing(entry, error, option) from None


def _missing(entry: "EntryPoint", error: ImportError, option: str) -> Exception:
    """Make the error for a library that an extra would install; an error of the entry point's own code stays."""
    library = (error.name or "").split(".")[0]
    return invalid(option, missing(entry.name, library)) if library in EXTRAS else error
