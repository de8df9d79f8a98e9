"""OpenVINO GenAI's pipeline with continuous batching; the model is converted by Optimum Intel."""

import json
from pathlib import Path

from benchmarks.peers.base import Engine, LoadOptions, Peer, Record

GROUP = 128
FACTS = "computes.json"
STEP_TOKENS = 2048  # for all requests together; OpenVINO's default of 256 is slower for prompts


class OpenVino(Peer):
    name = "openvino"
    distribution = "openvino-genai"
    requirements = (
        "openvino-genai==2026.4.1.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "torch==2.13.0",
    )
    unwanted = ("torchvision",)  # a CUDA build does not load with a CPU build of torch

    def convert(self, source: Path, target: Path, precision: str) -> None:
        import openvino
        from openvino_tokenizers import convert_tokenizer
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
        from transformers import AutoTokenizer

        schemes = {
            "bf16": None,
            "int8": OVWeightQuantizationConfig(bits=8, sym=True),
            "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=GROUP, ratio=1.0),
        }
        scheme = schemes[precision]
        quantization = {"load_in_8bit": False} if scheme is None else {"quantization_config": scheme}
        model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **quantization)
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.save_pretrained(target)
        parts = convert_tokenizer(tokenizer, with_detokenizer=True)
        for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
            openvino.save_model(part, target / f"openvino_{name}.xml")
        facts = describe(target / "openvino_model.xml", precision)
        (target / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    def load(self, options: LoadOptions) -> Engine:
        return _Engine(options)


def describe(model: Path, precision: str) -> dict[str, str]:
    """Return what the compiled model reports about itself. The pipeline compiles it again and does not report this."""
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU")
    activations = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if precision != "bf16" and (group := compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")):
        activations = f"int8 per group of {group}"
    weights = {"bf16": "bf16", "int8": "int8 per channel", "int4": f"int4 per group of {GROUP}"}
    return {
        "weights": weights[precision],
        "activations": activations,
        "cache": compiled.get_property("KV_CACHE_PRECISION").to_string(),
        "head": "bf16" if precision == "bf16" else "int8 per channel",
        "notes": f"{STEP_TOKENS} tokens a step",
    }


class _Engine(Engine):
    def __init__(self, options: LoadOptions) -> None:
        import openvino_genai

        self._options, self._api = options, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = options.max_streams
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 0  # grows as needed
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(options.directory, scheduler, "CPU", properties)
        self._count = 0

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        import numpy as np
        from openvino import Tensor

        config = self._api.GenerationConfig(max_new_tokens=output, ignore_eos=True, do_sample=False)
        record.start()
        running = {}
        for stream, prompt in enumerate(prompts):
            self._count += 1
            running[stream] = self._pipe.add_request(self._count, Tensor(np.array([prompt], dtype=np.int64)), config)
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for stream, handle in running.items():
                while handle.can_read():
                    for answer in handle.read().values():
                        for token in answer.generated_ids:
                            record.token(stream, token)

    def facts(self) -> dict[str, str]:
        facts: dict[str, str] = json.loads((Path(self._options.directory) / FACTS).read_text(encoding="utf-8"))
        return facts
