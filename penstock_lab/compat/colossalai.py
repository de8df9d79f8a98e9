"""ColossalAI-Inference's quick start, unchanged except for `.cuda()`:

    from penstock_lab.compat.colossalai import InferenceConfig, InferenceEngine

    model = transformers.LlamaForCausalLM(config)
    inference_config = InferenceConfig(dtype="fp32", max_batch_size=4, max_input_len=128, max_output_len=64)
    engine = InferenceEngine(model, tokenizer, inference_config, verbose=True)
    prompts = {'Nice to meet you, Colossal-Inference!'}
    engine.generate(prompts)

Requests run on the engine of penstock.LLM, as ColossalAI's request handler orders them: in three classes of prompt
lengths up to max_input_len, the longest first (`length * 3 // (max_input_len + 1)`), and a step begins new requests if
prefill_ratio of them wait for each one that decodes. Unlike there, a request waits for a bounded time.
"""

import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock import LLM, InvalidRequestError, RequestFailedError, SamplingParams
from penstock import register_logits_processor as register_logit_processor
from penstock.errors import check_int, fail, invalid
from penstock_lab.compat.colossalai_config import BEAMS, PROCESSORS, InferenceConfig, fields_of, sampling_of
from penstock_lab.compat.colossalai_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    with_policy,
)

__all__ = [
    "InferenceConfig",
    "InferenceEngine",
    "ModulePolicyDescription",
    "Policy",
    "Sequence",
    "SubModuleReplacementDescription",
    "register_logit_processor",
]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A finished request.

    Attributes:
        prompt: the text with its template applied; None if token ids were given.
    """

    request_id: int
    prompt: str | None
    input_token_id: list[int]
    output_token_id: list[int]


class InferenceEngine:
    """ColossalAI's engine on a penstock.LLM.

    Args:
        model_or_path: a Transformers model object, a directory, a hub name, or "demo".
        tokenizer: a Transformers or Penstock tokenizer, or a directory; None: the tokenizer in the model's directory.
        inference_config: None means the defaults, which serve in bfloat16.
        verbose: print the options that were chosen, and why, to standard error.
        model_policy: a Policy, or its class, that replaces modules of the model object (colossalai_policy.py); the
            object is changed, too.

    Attributes:
        llm: the penstock.LLM that computes.

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
        if not isinstance(inference_config, InferenceConfig | None):
            raise fail("inference_config", inference_config, "an InferenceConfig")
        self.inference_config = inference_config or InferenceConfig()
        if model_policy is not None:
            model_or_path = with_policy(model_or_path, model_policy)
        self._model, self._tokenizer = model_or_path, tokenizer
        self._start()
        self._generation: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._open: set[int] = set()  # numbers of the requests that wait or run
        self._finished: list[Sequence] = []  # not returned yet
        if verbose:
            for option, choice in self.llm.engine.model_info.choices_made.items():
                print(f"{option} = {choice}", file=sys.stderr)

    def _start(self, **options: Any) -> None:
        config = self.inference_config
        self.llm = LLM(model=self._model, tokenizer=self._tokenizer, **{**config.engine_options(), **options})
        client: Any = self.llm.engine
        client.engine.scheduler.policy.max_model_len = config.max_input_len + 1  # ends the last class

    def generate(
        self,
        prompts: str | Iterable[str] | None = None,
        prompts_token_ids: Any = None,
        return_token_ids: bool = False,
        generation_config: Any = None,
        *,
        request_ids: int | Iterable[int] | None = None,
    ) -> list[str] | tuple[list[str], list[list[int]]]:
        """Generate for these prompts and for all waiting requests until every one has finished.

        Args:
            prompts: one text, or a list, tuple or set of them. Results follow the iteration order, which a set leaves
                undefined; pass a list to match answers with prompts.
            prompts_token_ids: token ids in place of text: a list of lists, or a two-dimensional tensor or array.
            return_token_ids: also return the token ids of the answers.
            generation_config: Transformers' GenerationConfig (or a mapping), for these and for later requests. A key
                that names a logit processor holds its arguments.

        Returns:
            One text per request, prompt and answer, in ascending order of request id; with return_token_ids, a tuple
            of these texts and the answers' token ids.

        Raises:
            InvalidRequestError: a prompt or the config is wrong; none of this call's prompts is added.
            RequestFailedError: the computation of a request failed. The next call returns the other answers.
        """
        before = self._generation
        try:
            if generation_config is not None:
                self._generation = fields_of(generation_config)
                self._params({**self._generation, "max_length": None}, 0)  # check what does not depend on the prompts
            if prompts is not None or prompts_token_ids is not None:
                self.add_request(request_ids, prompts, prompts_token_ids)
        except BaseException:
            self._generation = before
            raise
        while self.llm.engine.has_unfinished_requests():
            self._step()
        finished = sorted(self._pop_finished(), key=lambda item: item.request_id)
        tokenizer = self.llm.get_tokenizer()
        decode = (lambda ids: "") if tokenizer is None else tokenizer.decode
        texts = [decode(item.input_token_id + item.output_token_id) for item in finished]
        return (texts, [item.output_token_id for item in finished]) if return_token_ids else texts

    def add_request(
        self,
        request_ids: int | Iterable[int] | None = None,
        prompts: str | Iterable[str] | None = None,
        prompts_token_ids: Any = None,
        **generation_fields: Any,
    ) -> None:
        """Queue requests for `step` or `generate`.

        Args:
            request_ids: one integer per prompt; None assigns numbers.
            generation_fields: fields of a GenerationConfig, for these requests only.

        Raises:
            InvalidRequestError: as in `generate`; none of the requests is added.
        """
        texts = None if prompts is None else [self.inference_config.formatted(text) for text in _texts(prompts)]
        tokenizer = self.llm.get_tokenizer()
        if prompts_token_ids is not None:
            ids = _id_lists(prompts_token_ids)
        elif texts is None or tokenizer is None:
            missing = "give prompts or" if texts is None else "the model has no tokenizer; give"
            raise invalid("prompts", f"{missing} prompts_token_ids")
        else:
            ids = [tokenizer.encode(text) for text in texts]
        if texts is not None and len(texts) != len(ids):
            raise fail("prompts_token_ids", prompts_token_ids, f"one list for each of {len(texts)} prompts")
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
        self._open.update(numbers)

    def step(self) -> list[Sequence]:
        """Compute one step and return the requests that finished in it.

        Raises:
            RequestFailedError: the computation of a request failed. The next call returns those that finished.
        """
        self._step()
        return self._pop_finished()

    def _step(self) -> None:
        finished = [output for output in self.llm.engine.step() if output.finished]
        self._open.difference_update(int(output.request_id) for output in finished)
        self._finished += [
            Sequence(int(out.request_id), out.prompt, list(out.prompt_token_ids), list(out.outputs[0].token_ids))
            for out in finished
            if out.error is None
        ]
        failures = [f"request {output.request_id}: {output.error}" for output in finished if output.error is not None]
        if failures:
            raise RequestFailedError("; ".join(failures))

    def _pop_finished(self) -> list[Sequence]:
        finished, self._finished = self._finished, []
        return finished

    def enable_spec_dec(self, drafter_model: Any, n_spec_tokens: int | None = None) -> None:
        """Start again with a draft model: a model object of Transformers, a directory or a name.

        Raises:
            InvalidRequestError: requests are open, the config has no use_spec_dec, or n_spec_tokens is wrong.
            ModelLoadError: the draft model cannot be used with this model.
        """
        if self._open or not self.inference_config.use_spec_dec:
            why = "requests are open" if self._open else "the InferenceConfig needs use_spec_dec=True"
            raise InvalidRequestError(f"enable_spec_dec: {why}", param="drafter_model")
        if n_spec_tokens is not None:
            self.inference_config = replace(self.inference_config, max_n_spec_tokens=n_spec_tokens)
        before = self.llm
        with tempfile.TemporaryDirectory() as directory:
            if not isinstance(drafter_model, str | os.PathLike):
                drafter_model.save_pretrained(directory)
                drafter_model = directory
            self._start(speculative_config=self.inference_config.drafts(model=str(drafter_model)))
        before.shutdown()  # it goes on if the draft model cannot be used

    def disable_spec_dec(self) -> None:
        """Do nothing: drafts change no token, and none is computed that does not pay."""

    def shutdown(self) -> None:
        """Release the model. A second call does nothing."""
        self.llm.shutdown()

    def _request_numbers(self, given: int | Iterable[int] | None, count: int) -> list[int]:
        if given is None:
            free = (number for number in self._numbers if number not in self._open)
            return list(itertools.islice(free, count))
        numbers = [given] if isinstance(given, int) else list(given)
        for number in numbers:
            check_int("request_ids", number, 0, 2**63 - 1)
        if len(set(numbers)) != count or len(numbers) != count:
            raise fail("request_ids", numbers, f"{count} different integers, one per prompt")
        return numbers

    def _params(self, fields: Mapping[str, Any], num_prompt_tokens: int) -> SamplingParams:
        """Join the config's sampling parameters and these GenerationConfig fields for one prompt."""
        config = self.inference_config
        if num_prompt_tokens > config.max_input_len:
            raise invalid("prompts", f"{num_prompt_tokens} tokens are more than max_input_len = {config.max_input_len}")
        asked = sampling_of(fields, num_prompt_tokens)
        if asked.get("max_tokens", 0) > config.max_output_len:
            allowed = f"at most max_output_len = {config.max_output_len}"
            raise fail("max_new_tokens", asked["max_tokens"], allowed)
        sampling = config.sampling()
        if "temperature" in asked:  # do_sample is given, so it replaces the config's own choice of sampling
            kept = ("max_tokens", "ignore_eos", *BEAMS, *PROCESSORS)
            sampling = {name: value for name, value in sampling.items() if name in kept}
        return SamplingParams(**(sampling | asked))


def _texts(prompts: str | Iterable[str]) -> list[str]:
    """List one text or several. None of them may be empty."""
    listed = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(listed, Mapping | bytes) or not isinstance(listed, Iterable):
        raise fail("prompts", prompts, "a text, or a list or set of texts")
    texts = list(listed)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise fail("prompts", text, "a text, or a list or set of texts, none of them empty")
    return texts


def _id_lists(given: Any) -> list[list[int]]:
    """List one list of ids or several. Tensors and arrays become lists."""
    values = _as_list(given)
    rows = [_as_list(item) for item in values] if isinstance(values, list | tuple) else []
    if rows and all(isinstance(item, int) for item in rows):
        return [rows]
    if not rows or not all(isinstance(item, list | tuple) for item in rows):
        raise fail("prompts_token_ids", given, "a list of lists of ids, or a two-dimensional tensor or array")
    return [list(item) for item in rows]


def _as_list(given: Any) -> Any:
    return given.tolist() if callable(getattr(given, "tolist", None)) else given
