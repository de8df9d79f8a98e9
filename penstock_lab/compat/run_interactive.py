"""JetStream's run_interactive.py with its flags on this engine: prints tokens and times. Also a smoke test.

    python -m penstock_lab.compat.run_interactive --model=gemma --size=7b --batch_size=128 --max_cache_length=2048 \
        --tokenizer_path=/models/gemma --sharding_config=gemma.yaml --checkpoint_path=/models/gemma

Without --checkpoint_path the weights are random, which still shows that the code runs. sizes.yaml defines the values of
`--model` and `--size`. Without --tokenizer_path prompts are token ids. --tensor_parallel_size=8 splits the model over 8
processes, where JetStream has the chips of its machine. A sharding file that is not found here is looked for in the
package, so default_shardings/gemma.yaml works anywhere; shardings.py has made these files.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock import LLM, InvalidRequestError, PenstockError, RequestOutputKind, SamplingParams
from penstock_lab.compat.shardings import FOLDER, read_sizes

MAX_OUTPUT_LENGTH = 1024
PROMPTS = (
    "I believe the meaning of life is",
    "The capital of France is",
    "To sort a list of numbers in Python,",
    "Once upon a time there was a dog that",
)
ID_PROMPTS = ([1, 2, 3, 4, 5], [6, 7, 8], [9] * 12, [10, 11])  # used without a tokenizer


def parser() -> argparse.ArgumentParser:
    """Define JetStream's flags."""
    made = argparse.ArgumentParser(prog="run_interactive", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--model", default="llama-2", help="a family in sizes.yaml; checked against a checkpoint")
    made.add_argument("--size", default="tiny", help="which model of that family")
    made.add_argument("--batch_size", type=int, default=32, metavar="N", help="maximum requests that run at once")
    made.add_argument("--max_cache_length", type=int, default=1024, metavar="N", help="longest prompt plus output")
    made.add_argument("--max_output_length", type=int, default=MAX_OUTPUT_LENGTH, metavar="N", help="longest output")
    made.add_argument("--tokenizer_path", metavar="DIR", help="a directory with a tokenizer.json")
    made.add_argument("--sharding_config", metavar="FILE", help="an axis for each weight; one process splits nothing")
    made.add_argument("--tensor_parallel_size", type=int, default=1, metavar="N", help="processes that share the model")
    made.add_argument("--checkpoint_path", metavar="DIR", help="a Hugging Face directory (default: random weights)")
    for name, what in (("quantize_weights", "weights to int8"), ("quantize_kv_cache", "the cache to int8")):
        made.add_argument(f"--{name}", type=_bool, nargs="?", const=True, default=False, help=f"quantise {what}")
    made.add_argument("--bf16_enable", type=_bool, nargs="?", const=True, help="bfloat16 (true) or float32 (false)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return the exit code: 2 for bad input, with one line on standard error."""
    args = parser().parse_args(argv)
    options: dict[str, Any] = {
        "max_num_seqs": args.batch_size,
        "max_model_len": args.max_cache_length,
        "sharding_config": _sharding_file(args.sharding_config),
        "tensor_parallel_size": args.tensor_parallel_size,
        "quantization": "int8" if args.quantize_weights else None,
        "kv_cache_dtype": "int8" if args.quantize_kv_cache else "auto",
        "dtype": {None: "auto", True: "bfloat16", False: "float32"}[args.bf16_enable],
    }
    try:
        config = read_size(args.model, args.size)
        if args.checkpoint_path is not None:
            _check_same(config, Path(args.checkpoint_path), args)
            _run(args.checkpoint_path, args, options)
        else:
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "config.json").write_text(json.dumps(config))
                _run(directory, args, options | {"load_format": "dummy"})
    except PenstockError as error:
        print(f"run_interactive: {error}", file=sys.stderr)
        return 2
    return 0


def _sharding_file(given: str | None) -> str | None:
    """Find a sharding file: at this path, or else among those of the package."""
    own = FOLDER.parent / (given or "")
    return str(own) if given is not None and not Path(given).exists() and own.is_file() else given


def _run(model: str, args: argparse.Namespace, options: dict[str, Any]) -> None:
    started = time.perf_counter()
    with LLM(model=model, tokenizer=args.tokenizer_path, **options) as llm:
        print(f"Load params  {time.perf_counter() - started:.3f} s")
        prompts: Any = PROMPTS if llm.get_tokenizer() is not None else ID_PROMPTS
        params = llm.get_default_sampling_params(
            temperature=0.0, max_tokens=args.max_output_length, output_kind=RequestOutputKind.CUMULATIVE
        )
        for prompt in prompts:
            _answer(llm, prompt, params)


def _answer(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    print(f"---- Input prompts are: {prompt}")
    started, first = time.perf_counter(), None
    for _, output in llm.stream([prompt], params):
        if first is None:
            first = time.perf_counter()
            print(f"---- Encoded tokens are: {output.prompt_token_ids}")
        answer, error = output.outputs[0], output.error
    if error is not None:
        raise InvalidRequestError(f"the request failed: {error}")
    ended, count = time.perf_counter(), len(answer.token_ids)
    print("---- All output tokens.")
    print(list(answer.token_ids))
    print("---- All output text.")
    print(answer.text)
    rate = (count - 1) / (ended - (first or ended)) if count > 1 else 0.0
    print(f"---- {count} tokens; first after {1e3 * ((first or ended) - started):.1f} ms, then {rate:.1f} tokens/s")


def read_size(model: str, size: str) -> dict[str, Any]:
    """Read the config.json of a model in sizes.yaml.

    Raises:
        InvalidRequestError: the family or size is unknown; the message lists the known ones.
    """
    families = read_sizes()
    if model not in families:
        raise InvalidRequestError(f"--model: {model!r} is not allowed; it must be one of {', '.join(families)}")
    sizes = families[model]
    if size not in sizes:
        raise InvalidRequestError(f"--size: {size!r} is not allowed; {model} has {', '.join(sizes)}")
    return sizes[size]


def _check_same(config: dict[str, Any], directory: Path, args: argparse.Namespace) -> None:
    """Raise InvalidRequestError if the checkpoint does not match --model and --size."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"--checkpoint_path: {directory}/config.json cannot be read: {error}") from None
    for key in ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if found.get(key) != config[key]:
            raise InvalidRequestError(
                f"--checkpoint_path: {key} = {found.get(key)} does not match --model={args.model} --size={args.size}: "
                f"{config[key]}"
            )


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() in ("true", "1", "yes")


if __name__ == "__main__":
    sys.exit(main())
