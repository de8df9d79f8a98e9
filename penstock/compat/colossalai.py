"""ColossalAI-Inference's quick start, as printed but for `.cuda()`:

    from penstock.compat.colossalai import InferenceConfig, InferenceEngine

    model = transformers.LlamaForCausalLM(config)
    inference_config = InferenceConfig(dtype="fp32", max_batch_size=4, max_input_len=128, max_output_len=64)
    engine = InferenceEngine(model, tokenizer, inference_config, verbose=True)
    prompts = {'Nice to meet you, Colossal-Inference!'}
    engine.generate(prompts)

It is the engine of penstock.LLM, so requests share every step and do not see each other.
"""

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock import validation as check
from penstock.compat.colossalai_config import InferenceConfig, check_config
from penstock.entrypoints.llm import LLM
from penstock.errors import InvalidRequestError, NotSupportedError, RequestFailedError
from penstock.interface.outputs import RequestOutput
from penstock.interface.sampling_params import SamplingParams
from penstock.plugins.logits_processors import PROCESSORS, register_logits_processor
from penstock.spec.config_reader import ConfigReader
from penstock.spec.generation_config import read_ignored, read_sampling

__all__ = ["InferenceConfig", "InferenceEngine", "Sequence", "register_logit_processor"]

register_logit_processor = register_logits_processor


@dataclass(frozen=True, slots=True)
class Sequence:
    """A request that has ended.

    Attributes:
        prompt: the text, in its template; None where ids were given.
    """

    request_id: int
    prompt: str | None
    input_token_id: list[int]
    output_token_id: list[int]


class InferenceEngine:
    """A model that answers prompts.

    Args:
        model_or_path: a model object of Transformers, a directory, a hub name, or "demo".
        tokenizer: of Transformers, ours, or a directory; None takes the one in the model's directory.
        inference_config: None is the defaults, which serve in bfloat16.
        verbose: tell on standard error what was chosen, and why.

    Attributes:
        llm: the penstock.LLM below.

    Raises:
        InvalidRequestError: an option is wrong; `param` names it.
        ModelLoadError: the model cannot be served.
    """

    def __init__(
        self,
        model_or_path: Any,
        tokenizer: Any = None,
        inference_config: InferenceConfig | None = None,
        verbose: bool = False,
        model_policy: Any = None,
    ) -> None:
        if model_policy is not None:
            raise NotSupportedError(
                "model_policy: there are no policies; a model of your own is registered by penstock.register_model",
                param="model_policy",
            )
        self.inference_config = check_config(inference_config)
        self.llm = LLM(model=model_or_path, tokenizer=tokenizer, **self.inference_config.engine_options())
        self._generation: dict[str, Any] = {}
        self._numbers = itertools.count()
        if verbose:
            for option, choice in self.llm.engine.model_info.choices_made.items():
                print(f"{option} = {choice}", file=sys.stderr)

    def generate(
        self,
        prompts: str | Iterable[str] | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: bool = False,
        generation_config: Any = None,
        *,
        request_ids: int | Iterable[int] | None = None,
    ) -> list[str] | tuple[list[str], list[list[int]]]:
        """Run these prompts, and all requests that wait, to their ends.

        Args:
            prompts: a text, or several: a list, a tuple or a set. A set has no order: results come in the order in
                which it is gone through, so whoever wants to know which answer is whose gives a list.
            prompts_token_ids: instead: a list of lists of ids, or a tensor or array of two axes.
            return_token_ids: also give the ids of the answers.
            generation_config: Transformers' GenerationConfig (or a mapping), for these and for later requests. A key
                that is the name of a logit processor gives it its arguments.

        Returns:
            A text for each request, by ascending request id: prompt and answer, as ColossalAI gives them; and, where
            asked for, a list of the answers' ids.

        Raises:
            InvalidRequestError: something is wrong with a prompt or the config; nothing of this call is generated.
            RequestFailedError: a computation failed.
        """
        if generation_config is not None:
            self._generation = _as_dict(generation_config)
        if prompts is not None or prompts_token_ids is not None:
            self.add_request(request_ids, prompts, prompts_token_ids)
        ended: list[Sequence] = []
        while self.llm.engine.has_unfinished_requests():
            ended += self.step()
        ended.sort(key=lambda item: item.request_id)
        texts = [self._text(item) for item in ended]
        return (texts, [item.output_token_id for item in ended]) if return_token_ids else texts

    def add_request(
        self,
        request_ids: int | Iterable[int] | None = None,
        prompts: str | Iterable[str] | None = None,
        prompts_token_ids: Any = None,
        **generation_fields: Any,
    ) -> None:
        """Let requests wait for `step` or `generate`.

        Args:
            request_ids: integers, one a prompt; None counts.
            generation_fields: of a GenerationConfig, for these requests.

        Raises:
            InvalidRequestError: as `generate`; none of the requests was added.
        """
        texts = None if prompts is None else [self.inference_config.formatted(_text(item)) for item in _texts(prompts)]
        ids = self._ids(texts) if prompts_token_ids is None else _id_lists(prompts_token_ids)
        if texts is not None and len(texts) != len(ids):
            raise check.fail("prompts_token_ids", prompts_token_ids, f"one list for each of {len(texts)} prompts")
        numbers = self._request_numbers(request_ids, len(ids))
        fields = self._generation | generation_fields
        params = [self._params(fields, len(item)) for item in ids]
        added: list[str] = []
        try:
            for index, number in enumerate(numbers):
                prompt = {"prompt_token_ids": ids[index], "prompt": None if texts is None else texts[index]}
                added.append(self.llm.engine.add_request(str(number), prompt, params[index]))
        except BaseException:
            for request_id in added:
                self.llm.engine.abort(request_id)
            raise

    def step(self) -> list[Sequence]:
        """Compute one step: the requests that ended in it.

        Raises:
            RequestFailedError: the computation of one failed.
        """
        return [_ended(output) for output in self.llm.engine.step() if output.finished]

    def enable_spec_dec(self, *_: Any, **__: Any) -> None:
        """Not built.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError("enable_spec_dec: speculative decoding is not built yet")

    def shutdown(self) -> None:
        """Free the model. A second call does nothing."""
        self.llm.shutdown()

    def _ids(self, texts: list[str] | None) -> list[list[int]]:
        tokenizer = self.llm.get_tokenizer()
        if texts is None:
            raise InvalidRequestError("prompts: give prompts or prompts_token_ids", param="prompts")
        if tokenizer is None:
            raise InvalidRequestError("prompts: there is no tokenizer; give prompts_token_ids", param="prompts")
        return [tokenizer.encode(text) for text in texts]

    def _request_numbers(self, given: int | Iterable[int] | None, count: int) -> list[int]:
        numbers = list(itertools.islice(self._numbers, count)) if given is None else _numbers(given)
        for number in numbers:
            check.check_int("request_ids", number, 0, 2**63 - 1)
        if len(set(numbers)) != count or len(numbers) != count:
            raise check.fail("request_ids", numbers, f"{count} different integers, one a prompt")
        return numbers

    def _params(self, fields: Mapping[str, Any], num_prompt_tokens: int) -> SamplingParams:
        """What the config and these fields of a GenerationConfig ask for, after a prompt of that length."""
        config = self.inference_config
        if num_prompt_tokens > config.max_input_len:
            raise InvalidRequestError(
                f"prompts: {num_prompt_tokens} tokens are more than max_input_len = {config.max_input_len}",
                param="prompts",
            )
        asked = _sampling(fields, num_prompt_tokens)
        if asked.get("max_tokens", 0) > config.max_output_len:
            allowed = f"at most max_output_len = {config.max_output_len}"
            raise check.fail("max_new_tokens", asked["max_tokens"], allowed)
        sampling = config.sampling()
        if "temperature" in asked:  # do_sample is said, so what the config says of drawing does not count
            kept = ("max_tokens", "ignore_eos", "repetition_penalty")
            sampling = {name: value for name, value in sampling.items() if name in kept}
        return SamplingParams(**(sampling | asked))

    def _text(self, ended: Sequence) -> str:
        tokenizer = self.llm.get_tokenizer()
        return "" if tokenizer is None else tokenizer.decode(ended.input_token_id + ended.output_token_id)


def _ended(output: RequestOutput) -> Sequence:
    if output.error is not None:
        raise RequestFailedError(f"request {output.request_id}: {output.error}")
    ids = list(output.outputs[0].token_ids)
    return Sequence(int(output.request_id), output.prompt, list(output.prompt_token_ids), ids)


def _sampling(fields: Mapping[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Fields of a GenerationConfig as SamplingParams spells them.

    Raises:
        InvalidRequestError: one would change the answer and is not supported.
    """
    read = ConfigReader(fields, "generation_config")
    sampling = read_sampling(read)
    if sampling.get("temperature") is None and read.boolean("do_sample", False):
        sampling["temperature"] = 1.0
    if read.has("min_new_tokens"):
        sampling["min_tokens"] = read.integer("min_new_tokens", 0, 2**31 - 1)
    if read.has("max_length") and "max_tokens" not in sampling:
        longest = read.integer("max_length", 1, 2**31 - 1)
        if longest <= num_prompt_tokens:
            raise check.fail("max_length", longest, f"more than the {num_prompt_tokens} tokens of the prompt")
        sampling["max_tokens"] = longest - num_prompt_tokens
    ends = read.raw("eos_token_id")
    if ends is not None:  # these ids end a text, and the model's own do not
        sampling |= {"stop_token_ids": ends if isinstance(ends, list) else [ends], "ignore_eos": True}
    read.raw("bos_token_id")
    processors = {name: fields[name] for name in fields if name in PROCESSORS and read.has(name)}
    if processors:
        sampling["logits_processors"] = processors
    ignored = read_ignored(read)
    if ignored:
        raise InvalidRequestError(f"generation_config: {', '.join(ignored)}: not supported", param=ignored[0])
    return sampling


def _as_dict(generation_config: Any) -> dict[str, Any]:
    given = generation_config
    values = given.to_dict() if callable(getattr(given, "to_dict", None)) else given
    if not isinstance(values, Mapping):
        raise check.fail("generation_config", given, "a GenerationConfig of Transformers, or a mapping")
    return dict(values)


def _texts(prompts: str | Iterable[str]) -> list[str]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise check.fail("prompts", prompts, "a text, or a list or set of texts")
    return list(prompts)


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str) or not prompt:
        raise check.fail("prompts", prompt, "a text, or a list or set of texts, none of them empty")
    return prompt


def _id_lists(given: Any) -> list[list[int]]:
    """One list or several, of integers; tensors and arrays become lists."""
    values = given.tolist() if callable(getattr(given, "tolist", None)) else given
    if not isinstance(values, list | tuple) or not values:
        raise check.fail("prompts_token_ids", given, "a list of lists of ids, or a tensor or array of two axes")
    rows = [item.tolist() if callable(getattr(item, "tolist", None)) else item for item in values]
    if all(isinstance(item, int) for item in rows):
        return [list(rows)]
    if not all(isinstance(item, list | tuple) for item in rows):
        raise check.fail("prompts_token_ids", given, "a list of lists of ids, or a tensor or array of two axes")
    return [list(item) for item in rows]


def _numbers(given: int | Iterable[int]) -> list[int]:
    return [given] if isinstance(given, int) else list(given)
