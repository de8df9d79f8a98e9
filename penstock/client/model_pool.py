"""ModelPool: the models of one server, each with its own engines.

A server of one model has a pool of one, which is always in use.
"""

from collections.abc import Iterator, Sequence

from penstock.client.engine_client import EngineClient


class ServedModel:
    """A model that a server has.

    Attributes:
        name: as requests name it; None: as its engine does.
    """

    def __init__(self, name: str | None, client: EngineClient) -> None:
        self.name = name
        self.client = client


class ModelPool:
    """The models of one server; the first answers requests that name none."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = list(models)
        self.draining = False

    @classmethod
    def of(cls, client: EngineClient) -> "ModelPool":
        """Make the pool of one model."""
        return cls([ServedModel(None, client)])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    async def use(self, model: ServedModel) -> None:
        """Wait until the model can compute, and keep it so until `release`."""

    def release(self, model: ServedModel) -> None:
        """End a use."""
