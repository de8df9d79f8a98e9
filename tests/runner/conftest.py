"""A runner with a fake model, stepped by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.interface.step import RequestStepOutput
from penstock.runner.model_runner import LocalExecutor, ModelRunner
from tests.fakes import FakeOps, HandScheduler, TinyModel, resolved_config, tiny_config


class Bench:
    """A HandScheduler joined to a LocalExecutor: `step` does both halves."""

    def __init__(self, model: Any, *, ops: Any = None, eos_token_ids: tuple[int, ...] = (), **options: Any) -> None:
        self.scheduler = HandScheduler(max_model_len=options.get("max_model_len", 128))
        self.model = model
        config, model_config = resolved_config(**options), tiny_config(model.vocab_size, eos_token_ids=eos_token_ids)
        self.runner = ModelRunner(model, ops or FakeOps(), [self.scheduler.group], config, model_config)
        self.executor = LocalExecutor(self.runner)

    def step(self, **arguments: Any) -> dict[str, RequestStepOutput]:
        output = self.scheduler.step(**arguments)
        results = self.executor.collect(self.executor.submit(output)).results
        assert list(results) == [item.request_id for item in output.scheduled]
        for request_id, result in results.items():
            self.scheduler.note(request_id, result.new_token_ids)
        return results

    def generate(self, request_id: str, prompt: list[int], count: int, **params: Any) -> list[int]:
        """Tokens of one request that has the bench for itself."""
        self.scheduler.add(request_id, prompt, **params)
        tokens = [token for _ in range(count) for token in self.step()[request_id].new_token_ids]
        self.scheduler.remove(request_id)
        return tokens


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes a Bench; a TinyModel unless told otherwise."""

    def make(model: Any = None, **arguments: Any) -> Bench:
        return Bench(TinyModel() if model is None else model, **arguments)

    return make
