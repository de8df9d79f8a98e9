"""Tenstorrent's Falcon decode backend, with the arguments that its document prints:

    from penstock_lab.compat.falcon import ARGS, DecodeBackend

    backend = DecodeBackend(ARGS | {"model": "/models/falcon-40b"})
    print(backend.generate(["Write a poem about Girafatron"]))

    inbox, outbox, status = Queue(), Queue(), Queue()
    Process(target=run_backend, args=(ARGS, inbox, outbox, status)).start()
    inbox.put(("user", "Write a poem about Girafatron"))     # ("user", None) cancels it; None: nothing more comes

    python -m penstock_lab.compat.falcon '{"model": "/models/falcon-40b", "prompts_file": "prompts.json"}'

A loop of seven stages, always in this order, gives each of 32 user rows one token: the next one of its prompt, or the
one that was sampled. `version` chooses the forward pass: "efficient-40b", the graph of conventions/falcon.py, or
"default", the engine's own. Both give the same bits, which `verify` checks in every tick.
"""

import json
import queue
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import InvalidRequestError, PenstockError, RequestFailedError
from penstock.errors import check_bool, check_choice, check_float, check_int, check_str, fail, invalid
from penstock.kernels.backends import load_ops
from penstock.kernels.cpu.library import LEVELS, best_level
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.metadata import AttentionMetadata, CacheSpec
from penstock.kernels.ops import Ops
from penstock.kernels.sampling import SamplingTensors
from penstock.kernels.scheme import Scheme
from penstock.kernels.tensors import as_array, as_torch
from penstock.layers.module import ForwardContext
from penstock.layers.weights import HeadLayout
from penstock.models.config_json import load_model_config
from penstock.tokenizer.hf import load_tokenizer
from penstock.tokenizer.tokenizer import IncrementalDetokenizer, StopStrings
from penstock.weights.hub import resolve_model
from penstock.weights.loader import load_model
from penstock_lab.conventions.falcon import USER_ROWS, flash_decode_attention, static_inputs
from penstock_lab.conventions.plain_versions import EFFICIENT

__all__ = ["ARGS", "DecodeBackend", "flash_decode_attention", "run_backend"]

STAGES = (
    "pick_prompts", "prepare_inputs", "decode", "switch_tokens", "push_outputs", "update_users", "send_status",
)  # fmt: skip
ARGS: dict[str, Any] = {  # as the document prints them
    "amp_level": None, "arch": "nebula-galaxy", "batch_size": 1, "device": "silicon", "enable_tvm_cache": True,
    "flash_decode": True, "fracture_attn": 0, "fracture_mlp": 8, "fracture_vocab": True, "fracture_vocab_factor": 8,
    "fuse": False, "hf_cache": "/proj_sw/large-model-cache/falcon40b/hf_cache", "host_queues": False, "load": None,
    "load_pretrained": True, "load_weights": False, "load_weights_dir": "falcon40b.pt", "log_level": "ERROR",
    "mode": "concurrent", "model": "tiiuae/falcon-40b-instruct", "multi_chip_placer": "parallel", "net_name": "",
    "num_chips": 32, "num_layers": 60, "num_outer_loops": 1000, "num_tokens": 1000000, "od_lm_head": True,
    "opt_level": 4, "output_at_end": False, "padded_lm_head": True, "perf": None, "place": "none", "precision": "bf16",
    "print_interval": 1, "print_option": "reprint", "prompts_file": "data/multi_prompt.json", "queues_on_host": False,
    "save": None, "save_weights": False, "save_weights_dir": "falcon40b.pt", "seqlen": 2048, "skip_lm_head": False,
    "stop": "\n\n", "temperature": 1.0, "top_k": 5, "top_p": 0.9, "user_rows": 32, "verify": False,
    "version": "efficient-40b",
}  # fmt: skip
REASONS = {  # arguments that must keep their value, and why
    "the hardware is this machine's; penstock plan --placement computes placements on simulated chips": (
        "arch device multi_chip_placer num_chips place host_queues queues_on_host net_name"
    ),
    "nothing is compiled when a model is loaded": "enable_tvm_cache",
    "user rows are 32, and the batch is 1": "batch_size user_rows",
    "attention is always in two parts": "flash_decode",
    "models are found in Hugging Face's cache, which HF_HOME moves": "hf_cache",
    "penstock convert writes and reads weights of its own": (
        "load save load_weights load_weights_dir save_weights save_weights_dir"
    ),
    "penstock bench measures": "perf",
    "without logits no token can be chosen; main_forward_part returns hidden states": "skip_lm_head",
    "all prompts run together, and are printed anew": "mode print_option",
    "nothing is logged; errors are raised": "log_level",
}
FIXED = {name: reason for reason, names in REASONS.items() for name in names.split()}
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEMES = {None: None, 0: None, 1: "int8", 2: "int4"}  # by amp_level, how weights are stored
OPT_LEVELS = ("reference", "portable", "avx2", "avx512", "best")  # by opt_level, what computes
PADDING = 512  # columns that padded_lm_head adds
IDLE_S = 0.05


def _one_of(*allowed: Any) -> Callable[[str, Any], None]:
    return lambda name, value: check_choice(name, value, allowed)


def _from(low: int, high: int) -> Callable[[str, Any], None]:
    return lambda name, value: check_int(name, value, low, high)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("num_outer_loops", "num_tokens", "print_interval"), _from(1, 2**62)),
    **dict.fromkeys(
        ("fracture_vocab", "fuse", "load_pretrained", "od_lm_head", "output_at_end", "padded_lm_head", "verify"),
        check_bool,
    ),
    **dict.fromkeys(("model", "prompts_file"), check_str),
    "amp_level": _one_of(*SCHEMES),
    "fracture_attn": _from(0, 2**16),
    "fracture_mlp": _from(0, 8),
    "fracture_vocab_factor": _from(1, 1024),
    "num_layers": _from(1, 2**16),
    "opt_level": _from(0, len(OPT_LEVELS) - 1),
    "precision": _one_of(*PRECISIONS),
    "seqlen": _from(1, 2**24),
    "stop": lambda name, value: check_str(name, value, optional=True),
    "temperature": lambda name, value: check_float(name, value, 0.0, 100.0),
    "top_k": _from(1, 2**31),
    "top_p": lambda name, value: check_float(name, value, 0.0, 1.0),
    "version": _one_of(EFFICIENT, "default"),
}


def check_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Fill up and check a dictionary of arguments.

    Raises:
        InvalidRequestError: an argument is unknown, has a value that is not allowed, or would have no effect here.
    """
    for name, value in args.items():
        if name not in ARGS:
            raise invalid(name, f"unknown argument; known are {', '.join(ARGS)}")
        if name in FIXED and value != ARGS[name]:
            raise invalid(name, f"{value!r} is not allowed; {ARGS[name]!r} is: {FIXED[name]}")
        if name in CHECKS:
            CHECKS[name](name, value)
    return {**ARGS, **args}


@dataclass(slots=True)
class UserInfo:
    """A prompt in a user row.

    Attributes:
        number: counts the prompts; the seed of its samples.
        position: the position of the token that is computed next.
        token_ids: the tokens of the answer.
        next_token: what switch_tokens chose.
        text: the text that push_outputs has passed on.
    """

    user_id: Any
    number: int
    prompt_tokens: list[int]
    detokenizer: IncrementalDetokenizer
    stops: StopStrings
    position: int = 0
    token_ids: list[int] = field(default_factory=list)
    next_token: int = 0
    is_cancelled: bool = False
    is_done: bool = False
    text: str = ""


class DecodeBackend:
    """The backend: queues, the loop, and a model.

    Attributes:
        users: the user of each row, or None.
        input_ids, position_ids, attention_mask, kv_mask_id, prompt_tokens, prompt_lengths: the inputs of the last tick.
        past_key_values: the cache as the graph returned it.
        trace: called with the name of each stage before it begins.
        num_ticks: how often the loop has run.

    Raises:
        InvalidRequestError: an argument is unknown or not allowed.
        ModelLoadError: the model cannot be served.
    """

    def __init__(
        self,
        args: Mapping[str, Any] | None = None,
        input_queue: Any = None,
        output_queue: Any = None,
        status_queue: Any = None,
    ) -> None:
        """Load the model. The queues may be multiprocessing's; those of inputs and outputs are made if they are not
        given."""
        self.args = args = check_args(args or {})
        self.input_queue = queue.SimpleQueue() if input_queue is None else input_queue
        self.output_queue = queue.SimpleQueue() if output_queue is None else output_queue
        self.status_queue, self.status = status_queue, {"input_queue": 0, "num_users": 0}
        self._waiting: deque[tuple[Any, str]] = deque()  # taken from the input queue
        self.users: list[UserInfo | None] = [None] * USER_ROWS
        self.trace: Callable[[str], None] = lambda stage: None
        self.num_ticks = self._num_prompts = self._num_tokens = self._num_crowds = 0
        self._is_closed = False
        self._load()

    def _load(self) -> None:
        args = self.args
        directory = resolve_model(args["model"], weights=args["load_pretrained"])
        model = load_model_config(directory)
        if model.architecture != "FalconForCausalLM":
            raise fail("model", args["model"], "a Falcon")
        if args["num_layers"] != model.num_hidden_layers:
            raise fail("num_layers", args["num_layers"], f"{model.num_hidden_layers}, as the model has")
        self.seqlen = min(args["seqlen"], model.context)
        self.tokenizer = load_tokenizer(directory)
        self.eos_token_ids = set(model.eos_token_ids)
        if not self.eos_token_ids:
            raise fail("model", args["model"], "a model with an EOS token")
        self._scheme = Scheme.parse(SCHEMES[args["amp_level"]])
        self._model_config, self._directory, self._ops = model, directory, self._make_ops()
        self.model = self._load_version(args["version"])
        is_graph = args["version"] == EFFICIENT
        self.past_key_values = self.model.init_kv_cache() if is_graph else []
        needs_engine = args["verify"] or not is_graph
        own = self._load_version("default") if is_graph and needs_engine else self.model
        self._engine = EngineForward(own, self._ops, self._model_config, self.seqlen) if needs_engine else None

    def _make_ops(self) -> Ops:
        dtype, name = PRECISIONS[self.args["precision"]], OPT_LEVELS[self.args["opt_level"]]
        if name == "reference":
            return load_ops("reference", dtype)
        best = best_level()
        if best is None or name == "best":
            return load_ops("cpu", dtype)
        level = LEVELS[min(LEVELS.index(name), LEVELS.index(best))]
        return CpuOps(dtype, level=level)

    def _load_version(self, version: str) -> Any:
        """Load the model with the head that the arguments ask for."""
        args, model = self.args, self._model_config
        width = model.vocab_size + (PADDING if args["padded_lm_head"] else 0)
        pieces = args["fracture_vocab_factor"] if args["fracture_vocab"] else 1
        options = {name: args[name] for name in ("fuse", "fracture_attn", "fracture_mlp")}
        return load_model(
            directory=self._directory,
            model_config=replace(model, model_impl=version, extra=options),
            ops=self._ops,
            load_format="auto" if args["load_pretrained"] else "dummy",
            max_model_len=self.seqlen,
            head=HeadLayout(pieces, width),
            scheme=self._scheme,
        )

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run_generate(self) -> None:
        """Run until the input queue gives None and all rows are empty, or until num_tokens tokens were sampled, or
        until all rows have become empty for the num_outer_loops-th time."""
        while not self._is_over():
            self.tick()

    def _is_over(self) -> bool:
        args, is_empty = self.args, not any(self.users)
        limits = self._num_tokens >= args["num_tokens"] or self._num_crowds >= args["num_outer_loops"]
        return limits or (self._is_closed and is_empty and not self._waiting)

    def tick(self) -> None:
        """Run each stage once."""
        for stage in STAGES:
            self.trace(stage)
            getattr(self, stage)()
        self.num_ticks += 1

    def generate(self, prompts: Sequence[str], on_tick: Callable[[list[str]], None] = lambda texts: None) -> list[str]:
        """Answer some prompts, and return the texts in their order. on_tick: called with the texts so far.

        Raises:
            InvalidRequestError: a prompt is too long.
        """
        texts = [""] * len(prompts)
        for number, prompt in enumerate(prompts):
            self.input_queue.put((number, prompt))
        while self._queued() or any(self.users):
            self.tick()
            while not self.output_queue.empty():
                user, text = self.output_queue.get()
                if isinstance(text, InvalidRequestError):
                    raise text
                texts[user] += text
            on_tick(texts)
        return texts

    def pick_prompts(self) -> None:
        """Put prompts from the input queue into free rows, first come, first served."""
        self._take()
        for row, user in enumerate(self.users):
            if user is None and self._waiting:
                user_id, prompt = self._waiting.popleft()
                ids = self.tokenizer.encode(prompt)
                if not 0 < len(ids) < self.seqlen:
                    allowed = f"1 to {self.seqlen - 1} tokens, not {len(ids)}"
                    self.output_queue.put((user_id, InvalidRequestError(f"prompt: it must have {allowed}")))
                    continue
                text = IncrementalDetokenizer(self.tokenizer, prompt_token_ids=ids)
                stops = StopStrings([self.args["stop"]] if self.args["stop"] else [])
                self.users[row] = UserInfo(user_id, self._num_prompts, ids, text, stops)
                self._num_prompts += 1
                for x in self.past_key_values:
                    x[0, row] = 0  # NaN times a mask of 0 is NaN

    def _take(self) -> None:
        """Take what is in the input queue. An idle backend waits for it a little."""
        is_idle = not (any(self.users) or self._waiting or self._is_closed)
        while not self._is_closed:
            try:
                found = self.input_queue.get(block=is_idle, timeout=IDLE_S)
            except queue.Empty:
                return
            is_idle = False
            if found is None:
                self._is_closed = True
            elif found[1] is None:
                self.cancel(found[0])
            else:
                self._waiting.append(tuple(found))

    def cancel(self, user_id: Any) -> None:
        """End a user's answer: its row gets the EOS token next, and is freed as if that had been sampled."""
        self._waiting = deque(item for item in self._waiting if item[0] != user_id)
        for user in self.users:
            if user is not None and user.user_id == user_id:
                user.is_cancelled = True

    def prepare_inputs(self) -> None:
        """Make the inputs of the graph. Their shapes are always the same."""
        row, slots = (1, USER_ROWS), self.seqlen
        ids, positions, active = (torch.zeros(row, dtype=torch.int64) for _ in range(3))
        self.prompt_tokens = torch.zeros(USER_ROWS, slots, dtype=torch.int64)
        self.prompt_lengths = torch.zeros(USER_ROWS, dtype=torch.int64)
        for index, user in enumerate(self.users):
            if user is not None:
                self.prompt_lengths[index] = len(user.prompt_tokens)
                self.prompt_tokens[index, : len(user.prompt_tokens)] = torch.tensor(user.prompt_tokens)
                ids[0, index] = [*user.prompt_tokens, *user.token_ids][user.position]
                positions[0, index], active[0, index] = user.position, 1
        inputs = static_inputs(ids, positions, active.bool(), slots)
        self.input_ids, self.position_ids = inputs["input_ids"], inputs["position_ids"]
        self.attention_mask, self.kv_mask_id = inputs["attention_mask"], inputs["kv_mask_id"]

    def decode(self) -> None:
        """Compute the logits [1, 32, V'] of all rows."""
        expected = None if self._engine is None else self._engine(self.input_ids, self.position_ids, self.kv_mask_id)
        if not self.past_key_values and expected is not None:
            self.logits = expected
            return
        outputs = self.model.main_forward_part(
            self.input_ids,
            position_ids=self.position_ids,
            attention_mask=self.attention_mask,
            kv_mask_id=self.kv_mask_id,
            past_key_values=self.past_key_values,
            on_device_lm_head=self.args["od_lm_head"],
        )
        self.past_key_values = outputs.past_key_values
        hidden, logits = outputs.last_hidden_state, outputs.logits
        self.logits = as_torch(self.model.compute_logits(hidden[0]))[None].clone() if logits is None else logits
        if expected is not None:
            self._compare(expected)

    def _compare(self, expected: Tensor) -> None:
        for row, user in enumerate(self.users):
            if user is not None and not torch.equal(self.logits[0, row], expected[0, row]):
                raise RequestFailedError(f"verify: row {row} at position {user.position} differs from the engine's")

    def switch_tokens(self) -> None:
        """Choose each row's next token: the next one of its prompt, a sampled one, or EOS if it was cancelled."""
        sampling = []
        for row, user in enumerate(self.users):
            if user is None:
                continue
            if user.is_cancelled:
                user.next_token = min(self.eos_token_ids)
            elif user.position + 1 < len(user.prompt_tokens):
                user.next_token = int(self.prompt_tokens[row, user.position + 1])
            else:
                sampling.append((row, user))
        for (_, user), token in zip(sampling, self._sample(sampling), strict=True):
            user.next_token = token
            self._num_tokens += 1

    def _sample(self, rows: Sequence[tuple[int, UserInfo]]) -> list[int]:
        """Sample a token for some rows, with the engine's noise: that of (seed, choice 0, output position)."""
        if not rows:
            return []
        args, count = self.args, len(rows)
        key = torch.tensor([[user.number, 0, len(user.token_ids)] for _, user in rows])
        params = SamplingTensors(
            torch.full((count,), args["temperature"]),
            torch.full((count,), min(args["top_k"], self._model_config.vocab_size)),
            torch.full((count,), args["top_p"]),
            noise_key=key,
        )
        if not args["temperature"]:
            params = SamplingTensors(params.temperature)
        logits = self.logits[0, [row for row, _ in rows]].contiguous()
        ids, healthy = (as_array(x) for x in self._ops.choose(logits, params))
        if not healthy.all():
            raise RequestFailedError(f"row {rows[int(healthy.argmin())][0]}: the model's logits are not finite")
        return [int(token) for token in ids]

    def push_outputs(self) -> None:
        """Pass the text of new tokens on, as soon as it cannot become a stop string."""
        for user in filter(None, self.users):
            if not user.is_cancelled and user.position + 1 < len(user.prompt_tokens):
                continue
            is_eos, is_last = user.next_token in self.eos_token_ids, user.position + 2 >= self.seqlen
            piece = "" if is_eos else user.detokenizer.push([user.next_token])
            text, stop = user.stops.push(piece + (user.detokenizer.finish() if is_eos or is_last else ""))
            user.is_done = is_eos or is_last or stop is not None
            if user.is_done and stop is None:
                text += user.stops.finish()
            if text:
                user.text += text
                self.output_queue.put((user.user_id, text))
            if not is_eos:
                user.token_ids.append(user.next_token)

    def update_users(self) -> None:
        """Free the rows of users whose answer has ended; the others go on to their next position."""
        had_users = any(self.users)
        for row, user in enumerate(self.users):
            if user is not None and user.is_done:
                self.users[row] = None
            elif user is not None:
                user.position += 1
        self._num_crowds += had_users and not any(self.users)

    def send_status(self) -> None:
        """Put the numbers of waiting prompts and of users on the status queue."""
        self.status = {"input_queue": self._queued(), "num_users": sum(user is not None for user in self.users)}
        if self.status_queue is not None:
            self.status_queue.put(self.status)

    def _queued(self) -> int:
        return len(self._waiting) + int(self.input_queue.qsize())


class EngineForward:
    """The engine's own forward pass over user rows: paged attention, and one block for each row."""

    def __init__(self, model: Any, ops: Ops, cfg: Any, slots: int) -> None:
        self._model, self._ops, self._cfg = model, ops, cfg
        self._block = -(-slots // 16) * 16
        spec = CacheSpec(USER_ROWS, self._block, cfg.num_key_value_heads, cfg.head_dim, ops.dtype)
        self._caches = tuple(ops.new_kv_cache(spec) for _ in range(cfg.num_hidden_layers))

    def __call__(self, input_ids: Tensor, position_ids: Tensor, kv_mask_id: Tensor) -> Tensor:
        """Compute the logits [1, 32, V'] of the rows that are in use."""
        rows = (kv_mask_id[0] >= 0).nonzero()[:, 0]
        positions = position_ids[0, rows]
        meta = AttentionMetadata(
            torch.arange(len(rows) + 1, dtype=torch.int32),
            (positions + 1).to(torch.int32),
            rows[:, None].to(torch.int32),
            rows * self._block + positions,
            self._block,
            None,
        )
        layers = self._cfg.num_hidden_layers
        ctx = ForwardContext(positions, self._caches, (meta,), (0,) * layers)
        found = as_torch(self._model.compute_logits(self._model(input_ids[0, rows], ctx)))
        logits = torch.zeros(1, USER_ROWS, found.shape[1])
        logits[0, rows] = found
        return logits


def run_backend(args: Mapping[str, Any], input_queue: Any, output_queue: Any, status_queue: Any) -> None:
    """Run a backend, as the target of a multiprocessing.Process."""
    DecodeBackend(args, input_queue, output_queue, status_queue).run_generate()


def main(argv: Sequence[str]) -> int:
    """Answer the prompts of prompts_file, a JSON list of texts. argv: the arguments as one JSON object."""
    try:
        args = check_args(json.loads(argv[0]) if argv else {})
        prompts = json.loads(Path(args["prompts_file"]).read_text(encoding="utf-8"))
        backend = DecodeBackend(args)

        def show(texts: list[str]) -> None:
            if not args["output_at_end"] and backend.num_ticks % args["print_interval"] == 0:
                print("\n".join([f"--- tick {backend.num_ticks}", *texts]))

        for prompt, text in zip(prompts, backend.generate(prompts, show), strict=True):
            print(f"{prompt}{text}\n")
    except (PenstockError, OSError, ValueError) as error:
        print(f"falcon: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
