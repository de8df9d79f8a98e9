"""llama.cpp through the C API of its Python binding, with its own batches and sequences but without its server."""

import ctypes
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.base import Engine, LoadOptions, Peer, Record

FILE_TYPES = {"int8": 7, "int4": 2}  # LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_Q4_0
BATCH = 2048  # tokens in a call; llama.cpp computes them in pieces of 512
FILE = "model.gguf"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class LlamaCpp(Peer):
    name = "llama.cpp"
    distribution = "llama-cpp-python"
    requirements = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0", "ml_dtypes==0.5.4")
    pip_options = ("--no-binary", "llama-cpp-python")  # built here, for this processor

    def build_environment(self) -> dict[str, str]:
        left_out = ("TOOLS", "EXAMPLES", "TESTS", "SERVER")
        options = ["-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
        options += [f"-DLLAMA_BUILD_{part}=OFF" for part in left_out]
        return {"CMAKE_ARGS": " ".join(options), "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}

    def convert(self, source: Path, target: Path, precision: str) -> None:
        target.mkdir(parents=True)
        if precision == "bf16":
            write_gguf(source, target / FILE)
            return
        import llama_cpp

        with tempfile.TemporaryDirectory(dir=target) as place:
            write_gguf(source, Path(place) / FILE)
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = FILE_TYPES[precision]
            paths = (str(Path(place) / FILE).encode(), str(target / FILE).encode())
            if llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
                raise RuntimeError(f"llama_model_quantize failed for {precision}")

    def load(self, options: LoadOptions) -> Engine:
        return _Engine(options)


def write_gguf(source: Path, target: Path) -> None:
    """Write a Transformers Llama as GGUF in bfloat16, with norms in float32. It needs no vocabulary for token ids."""
    import gguf
    import ml_dtypes  # noqa: F401 (numpy learns bfloat16)
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads["q"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, weight in load_file(source / "model.safetensors").items():
        part = name.removesuffix(".weight")
        if part in OUTER_NAMES:
            new = OUTER_NAMES[part]
        else:
            layer, _, rest = part.removeprefix("model.layers.").partition(".")
            new = f"blk.{layer}.{NAMES[rest]}"
            if rest in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = _interleave(weight, heads[rest[10]])
        if weight.ndim == 1:
            writer.add_tensor(f"{new}.weight", weight.astype(np.float32))
        else:
            raw = np.ascontiguousarray(weight).view(np.uint8)
            writer.add_tensor(f"{new}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(weight: Any, heads: int) -> Any:
    """Interleave the two halves of each head, because GGUF's Llama rotates neighbouring elements."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


class _Engine(Engine):
    def __init__(self, options: LoadOptions) -> None:
        import llama_cpp

        self._api, self._options = llama_cpp, options
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # it would log every context
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        # llama.cpp's kernels for AMX tiles crash on repacked q8_0 and q4_0.
        self._repack = options.precision == "bf16" or "amx_tile" not in Path("/proc/cpuinfo").read_text()
        params.use_extra_bufts = self._repack
        path = str(Path(options.directory) / FILE).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, params)
        if not self._model:
            raise RuntimeError("llama_model_load_from_file failed")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        context = self._new_context(len(prompts), max(map(len, prompts)) + output, shared)
        try:
            self._run(context, prompts, output, shared, record)
        finally:
            self._api.llama_free(context)

    def _new_context(self, streams: int, length: int, shared: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = shared + streams * (length - shared) if shared else streams * (-(-length // 256) * 256)
        params.n_seq_max, params.n_batch = streams, BATCH
        params.n_threads = params.n_threads_batch = self._options.threads
        params.kv_unified = bool(shared)  # one buffer for all streams, so that they can share a prefix
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        return context

    def _run(self, context: Any, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        record.start()
        if shared:
            self._decode(context, [(0, place, token, -1) for place, token in enumerate(prompts[0][:shared])], {})
            memory = self._api.llama_get_memory(context)
            for stream in range(1, len(prompts)):
                self._api.llama_memory_seq_cp(memory, 0, stream, -1, -1)
        rows = [
            (stream, place, prompt[place], stream if place == len(prompt) - 1 else -1)
            for stream, prompt in enumerate(prompts)
            for place in range(shared, len(prompt))
        ]
        tokens: dict[int, int] = {}
        self._decode(context, rows, tokens)
        for step in range(output):
            for stream, token in tokens.items():
                record.token(stream, token)
            if step < output - 1:
                rows = [(stream, len(prompts[stream]) + step, token, stream) for stream, token in tokens.items()]
                self._decode(context, rows, tokens)

    def _decode(self, context: Any, rows: list[tuple[int, int, int, int]], tokens: dict[int, int]) -> None:
        """Compute rows of (stream, position, token, stream whose next token is wanted or -1). Put these in `tokens`."""
        import numpy as np

        batch = self._batch
        for begin in range(0, len(rows), BATCH):
            piece = rows[begin : begin + BATCH]
            batch.n_tokens = len(piece)
            for row, (stream, place, token, wanted) in enumerate(piece):
                batch.token[row], batch.pos[row], batch.logits[row] = token, place, wanted >= 0
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
            if status := self._api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for row, (_, _, _, wanted) in enumerate(piece):
                if wanted >= 0:
                    logits = self._api.llama_get_logits_ith(context, row)
                    tokens[wanted] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def facts(self) -> dict[str, str]:
        types = {"bf16": "bf16", "int8": "q8_0, int8 per group of 32", "int4": "q4_0, int4 per group of 32"}
        activations = {"bf16": "bf16", "int8": "int8 per group of 32", "int4": "int8 per group of 32"}
        heads = {"bf16": "bf16", "int8": "q8_0", "int4": "q6_K"}
        built = re.findall(r"(AVX\w*|AMX\w*|LLAMAFILE|REPACK) = 1", self._api.llama_print_system_info().decode())
        return {
            "weights": types[self._options.precision],
            "activations": activations[self._options.precision],
            "cache": "f16",
            "head": heads[self._options.precision],
            "notes": ("repacked for this processor" if self._repack else "not repacked: crashes with AMX")
            + f"; built with {' '.join(built)}",
        }
