"""The runner and a backend whose tensors live elsewhere, played on the CPU."""

from collections.abc import Callable
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.kernels.sampling import TokenScores
from penstock.layers.module import ForwardContext
from tests.fakes import FakeOps, TinyModel

ELSEWHERE = torch.device("cuda", 7)  # a name; nothing is ever put there


class Pretend(TorchFunctionMode):
    """Tensors moved to ELSEWHERE stay in memory and carry a mark, as does all that is computed from them. Like a real
    device it refuses to mix marked and unmarked tensors in one call, or to show a marked one to numpy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args[1] == ELSEWHERE:
            return marked(args[0].clone())
        if func is Tensor.cpu:
            return args[0].clone()
        result = func(*args, **kwargs)
        kinds = {is_elsewhere(item) for item in tensors([*args, *kwargs.values()]) if item.ndim}
        assert len(kinds) < 2, f"{func} mixes devices"
        if True in kinds:
            assert func is not Tensor.numpy
            for item in tensors(result):
                marked(item)
        return result


def marked(tensor: Tensor) -> Tensor:
    tensor.__dict__["elsewhere"] = True
    return tensor


def is_elsewhere(tensor: Tensor) -> bool:
    return "elsewhere" in tensor.__dict__


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, its tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [tensor for field in fields(value) for tensor in tensors(getattr(value, field.name))]
    return []


def at_home(value: Any) -> Any:
    """The same value with every tensor on the CPU."""
    found = tensors(value)
    assert found
    assert all(is_elsewhere(tensor) for tensor in found), "a tensor that is not on the backend's device"
    for tensor in found:
        del tensor.__dict__["elsewhere"]
    return value


class ElsewhereOps(FakeOps):
    device = ELSEWHERE

    def log_softmax(self, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        return super().log_softmax(at_home(logits.clone())).to(ELSEWHERE)

    def choose(self, logits: Tensor, params: Any) -> tuple[Tensor, Tensor]:
        ids, healthy = super().choose(at_home(logits.clone()), at_home(params))
        return ids.to(ELSEWHERE), healthy.to(ELSEWHERE)

    def token_scores(self, logits: Tensor, ids: Tensor, num_top: int) -> TokenScores:
        found = FakeOps().token_scores(at_home(logits.clone()), at_home(ids.clone()), num_top)
        return TokenScores(*(part.to(ELSEWHERE) for part in astuple(found)))


class ElsewhereModel(TinyModel):
    def __call__(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return super().__call__(at_home(input_ids), at_home(ctx)).to(ELSEWHERE)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(at_home(hidden.clone())).to(ELSEWHERE)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2},
    "random": {"temperature": 1.0, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "adjusted": {
        "logit_bias": {3: 2.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.1,
        "min_tokens": 2,
        "prompt_logprobs": 1,
    },
    "bad": {"bad_words_token_ids": ((4,),)},
    "masked": {"bad_words_token_ids": tuple((token,) for token in range(40)), "logprobs": 0},
}


def results_of(made: Any) -> list[Any]:
    for name, params in REQUESTS.items():
        made.scheduler.add(name, [39 if name == "bad" else 5, 6, 7, 39 if name == "bad" else 8], **params)
    steps = [made.step()]
    made.scheduler.remove("bad")
    made.scheduler.remove("masked")
    return [*steps, made.step(), made.step()]


def test_every_tensor_is_on_the_backends_device(bench: Callable[..., Any]) -> None:
    """Guards against a tensor of the step that stays on the CPU, or results that never come back: the tokens,
    log-probabilities and errors are those of the CPU."""
    expected = results_of(bench(TinyModel(nan_token=39), eos_token_ids=(1,)))
    assert sum(result.error is not None for result in expected[0].values()) == 2
    with Pretend():
        found = results_of(bench(ElsewhereModel(nan_token=39), ops=ElsewhereOps(), eos_token_ids=(1,)))
    assert found == expected
