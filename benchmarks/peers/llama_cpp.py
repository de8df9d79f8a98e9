"""llama.cpp and its fork ik_llama.cpp through the C API of their Python bindings: own batches and sequences, no server.

Both read the GGUF files that llama.cpp writes and quantises here; Penstock reads them too.
"""

import ctypes
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.base import GGUF_PRECISIONS, LoadOptions, Peer, RankingEngine, Record

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}  # llama.h's LLAMA_FTYPE_MOSTLY_Q8_0 and so on
FILES = {"bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0", **{name: name.partition("-")[0] for name in GGUF_PRECISIONS}}
HEADS = {"bf16": "bf16", "Q8_0": "q8_0", "Q4_0": "q6_K", "Q4_K_M": "q6_K"}  # type of the LM head in these files
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
    requirements: tuple[str, ...] = (
        "llama-cpp-python==0.3.36",
        "gguf==0.19.0",
        "safetensors==0.8.0",
        "ml_dtypes==0.5.4",
    )
    pip_options: tuple[str, ...] = ("--no-binary", "llama-cpp-python")  # built here, for this processor
    precisions = tuple(FILES)

    def build_environment(self) -> dict[str, str]:
        left_out = ("TOOLS", "EXAMPLES", "TESTS", "SERVER")
        options = ["-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
        options += [f"-DLLAMA_BUILD_{part}=OFF" for part in left_out]
        return {"CMAKE_ARGS": " ".join(options), "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}

    def files(self, precision: str) -> tuple[str, str]:
        return LlamaCpp.name, FILES[precision]

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

    def load(self, options: LoadOptions) -> "_Engine":
        return _Engine(options)


class IkLlamaCpp(LlamaCpp):
    name = "ik_llama.cpp"
    distribution = "ik-llama-cpp-python"
    requirements = ("ik-llama-cpp-python==0.1.5",)
    pip_options = ("--only-binary", "ik-llama-cpp-python")  # its source distribution lacks a file of its build

    def load(self, options: LoadOptions) -> "_Engine":
        return _IkEngine(options)


def write_gguf(source: Path, target: Path) -> None:
    """Write a Transformers Llama and its byte-level BPE as GGUF in bfloat16, with norms in float32."""
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
    writer.add_vocab_size(config["vocab_size"])
    words = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in words["added_tokens"]}
    tokens = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in words["model"]["merges"]])
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


class _Engine(RankingEngine):
    binding = "llama_cpp"

    def __init__(self, options: LoadOptions) -> None:
        self._api, self._options = importlib.import_module(self.binding), options
        self._api.llama_backend_init()
        path = str(Path(options.directory) / FILE).encode()
        self._model = self._api.llama_model_load_from_file(path, self._model_params())
        if not self._model:
            raise RuntimeError("llama_model_load_from_file failed")
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._batch = self._api.llama_batch_init(BATCH, 0, 1)

    def _model_params(self) -> Any:
        self._silent = self._api.llama_log_callback(lambda level, text, data: None)  # it would log every context
        self._api.llama_log_set(self._silent, None)
        params = self._api.llama_model_default_params()
        # llama.cpp's kernels for AMX tiles crash on repacked q8_0 and q4_0.
        repack = FILES[self._options.precision] == "bf16" or "amx_tile" not in Path("/proc/cpuinfo").read_text()
        params.use_extra_bufts = repack
        built = re.findall(r"(AVX\w*|AMX\w*|LLAMAFILE|REPACK) = 1", self._api.llama_print_system_info().decode())
        form = "repacked for this processor" if repack else "not repacked: crashes with AMX"
        self._notes = f"{form}; built with {' '.join(built)}"
        return params

    def _context_params(self, streams: int) -> Any:
        return self._api.llama_context_default_params()

    def generate(self, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        context = self._new_context(len(prompts), max(map(len, prompts)) + output, shared)
        try:
            self._run(context, prompts, output, shared, record)
        finally:
            self._api.llama_free(context)

    def _new_context(self, streams: int, length: int, shared: int) -> Any:
        params = self._context_params(streams)
        params.n_ctx = shared + streams * (length - shared) if shared else streams * (-(-length // 256) * 256)
        params.n_seq_max, params.n_batch = streams, BATCH
        params.n_threads = params.n_threads_batch = self._options.threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = bool(shared)  # one buffer for all streams, so that they can share a prefix
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        return context

    def _run(self, context: Any, prompts: list[list[int]], output: int, shared: int, record: Record) -> None:
        record.start()
        if shared:
            for _ in self._decode(context, [(0, place, token, -1) for place, token in enumerate(prompts[0][:shared])]):
                pass  # no token is wanted
            for stream in range(1, len(prompts)):
                self._copy_cache(context, stream)
        rows = [
            (stream, place, prompt[place], stream if place == len(prompt) - 1 else -1)
            for stream, prompt in enumerate(prompts)
            for place in range(shared, len(prompt))
        ]
        for step in range(output):
            tokens = {stream: int(logits.argmax()) for stream, logits in self._decode(context, rows)}
            for stream, token in tokens.items():
                record.token(stream, token)
            rows = [(stream, len(prompts[stream]) + step, token, stream) for stream, token in tokens.items()]

    def _copy_cache(self, context: Any, stream: int) -> None:
        """Let a stream begin with what stream 0 has in the cache."""
        self._api.llama_memory_seq_cp(self._api.llama_get_memory(context), 0, stream, -1, -1)

    def rank(self, prompt: list[int], output: int, top: int) -> list[list[tuple[int, float]]]:
        import numpy as np

        steps = []
        context = self._new_context(1, len(prompt) + output, 0)
        rows = [(0, place, token, 0 if place == len(prompt) - 1 else -1) for place, token in enumerate(prompt)]
        for _ in range(output):
            [(_, logits)] = self._decode(context, rows)
            best = np.argsort(-logits, kind="stable")[:top]
            total = np.logaddexp.reduce(logits.astype(np.float64))
            steps.append([(int(token), float(logits[token] - total)) for token in best])
            rows = [(0, len(prompt) + len(steps) - 1, steps[-1][0][0], 0)]
        self._api.llama_free(context)
        return steps

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (self._api.llama_token * (len(raw) + 2))()
        vocab = self._api.llama_model_get_vocab(self._model)
        return list(ids[: self._api.llama_tokenize(vocab, raw, len(raw), ids, len(ids), True, False)])

    def _decode(self, context: Any, rows: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, Any]]:
        """Compute rows of (stream, position, token, stream whose next token is wanted or -1). Yield (stream, logits)
        for each wanted token; the logits are valid until the next one is asked for."""
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
                    yield wanted, np.ctypeslib.as_array(logits, (self._vocab_size,))

    def facts(self) -> dict[str, str]:
        file = FILES[self._options.precision]
        types = {"Q8_0": "q8_0, int8 per group of 32", "Q4_0": "q4_0, int4 per group of 32", "Q4_K_M": "q4_K and q6_K"}
        activations = {"bf16": "bf16", "Q4_K_M": "int8 per group of 256"}
        return {
            "weights": types.get(file, file),
            "activations": activations.get(file, "int8 per group of 32"),
            "cache": "f16",
            "head": HEADS[file],
            "notes": self._notes,
        }


class _IkEngine(_Engine):
    binding = "ik_llama_cpp._ctypes_api"

    def _model_params(self) -> Any:
        params = self._api.llama_model_default_params()
        params.repack_tensors = True
        self._notes = "repacked while loading; flash attention for one stream only: with more it aborts"
        return params

    def _context_params(self, streams: int) -> Any:
        params = super()._context_params(streams)
        params.flash_attn = streams == 1
        return params

    def _copy_cache(self, context: Any, stream: int) -> None:
        copy = self._api._lib.llama_kv_cache_seq_cp  # the binding declares it nowhere
        copy.argtypes, copy.restype = (ctypes.c_void_p, *(4 * [ctypes.c_int32])), None
        copy(context, 0, stream, -1, -1)
