"""Encoders and classifiers as the engine computes them, against Transformers and against themselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors

from penstock import LLM, EngineConfig, InvalidRequestError, ModelLoadError, PoolingParams
from penstock.assembly.engine import why_no_gpu
from penstock.models.config_json import load_model_config, parse_model_config
from tests.hf_models import TINY, Made, random_ids, randomise
from tests.kernels.packed import levels
from tests.weights.gguf_files import add_wordpiece

pytestmark = [pytest.mark.skipif(not levels(), reason="no native library")]
CONTEXT = 300  # more than the rows of one item of attention
SIZES = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
SIZES |= {"num_attention_heads": 6, "max_position_embeddings": CONTEXT}
PROMPTS = [{"prompt_token_ids": [max(3, item) for item in random_ids(n, n)]} for n in (1, 5, 40, 70, 297)]
FAMILIES = {
    "Bert": SIZES,
    "Roberta": SIZES | {"type_vocab_size": 1},
    "XLMRoberta": SIZES | {"type_vocab_size": 1, "pad_token_id": 2},
    "NomicBert": SIZES,
    "DistilBert": {name: SIZES[name] for name in ("vocab_size", "max_position_embeddings")}
    | {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 6},
    "MPNet": SIZES,
    "ModernBert": SIZES
    | {"num_hidden_layers": 4, "local_attention": 20, "pad_token_id": 0, "bos_token_id": 1}
    | {"eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
LABELS = {"id2label": {0: "bad", 1: "good", 2: "neither"}, "label2id": {"bad": 0, "good": 1, "neither": 2}}
ONE_LABEL = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
WORDS = [f"w{index}" for index in range(SIZES["vocab_size"] - 5)]


def make(directory: Path, family: str, kind: str = "Model", **fields: Any) -> Made:
    """A random model of Transformers' class, and its directory, with a tokenizer of words."""
    config_class, model_class = (getattr(transformers, family + name) for name in ("Config", kind))
    usual = {} if family == "GPT2" else FAMILIES.get(family, TINY)
    config = config_class(**usual | fields, attn_implementation="eager")
    model = model_class(config).eval()
    randomise(model, 0)
    model.save_pretrained(directory / family)
    tokenizer = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]",
                                                      "[SEP]", "[MASK]", *WORDS])}, unk_token="[UNK]"))  # fmt: skip
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    kind_of_second = 0 if family == "Roberta" else 1
    pair = f"[CLS] $A [SEP] $B:{kind_of_second} [SEP]:{kind_of_second}"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.save(str(directory / family / "tokenizer.json"))
    return model, directory / family


def states(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].numpy()


def of_all(llm: LLM, prompts: list[Any] = PROMPTS, **params: Any) -> list[np.ndarray]:
    return [item.outputs.data for item in llm.encode(prompts, PoolingParams(pooling_type="ALL", **params))]


@pytest.mark.matrix("states")
@pytest.mark.matrix("same bits")
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Guards against a token that does not see those after it, positions that begin elsewhere (RoBERTa's), a norm
    before the sum, the wrong half of a gate, distances counted the wrong way (MPNet's), a window that ends a token too
    early or on one side only (ModernBERT's); and against bits that the crowd, the threads or a preemption change."""
    model, directory = make(tmp_path, family)
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": CONTEXT}
    with LLM(str(directory), threads=1, **options) as llm:
        alone = [of_all(llm, [prompt])[0] for prompt in PROMPTS]
        again = [of_all(llm, [prompt])[0] for prompt in PROMPTS]  # with plans that are known by now
        assert [item.tobytes() for item in again] == [item.tobytes() for item in alone]
        assert not llm.config.cache.enable_prefix_caching
        assert llm.config.scheduler.max_model_len == load_model_config(directory).max_position_embeddings
    for prompt, found in zip(PROMPTS, alone, strict=True):
        np.testing.assert_allclose(found, states(model, prompt["prompt_token_ids"]), atol=1e-5, rtol=0)
    with LLM(str(directory), threads=2, kv_cache_memory_bytes=2**21, **options) as llm:
        crowd = of_all(llm, PROMPTS * 3)
        assert [item.tobytes() for item in crowd] == [item.tobytes() for item in alone * 3]
        seen = llm.forward(PROMPTS[2], skip_lm_head=True, output_attentions=True)
        assert seen.last_hidden_state.tobytes() == alone[2].tobytes()
        np.testing.assert_allclose(seen.attentions[0].sum(axis=-1), 1.0, atol=1e-5)
        assert (seen.attentions[0] > 0).all()  # each token sees each other
        llm.built.engine.check_integrity()


@pytest.mark.matrix("bfloat16")
@pytest.mark.matrix("int8")
@pytest.mark.matrix("2 ranks")
@pytest.mark.parametrize("family", ["Bert", "MPNet", "ModernBert"])
def test_other_kernels_and_types(family: str, tmp_path: Path) -> None:
    """Guards against a mask or a bias of the specification that is not that of the native kernels; in bfloat16 and with
    an int8 cache, against a value that is rounded twice, or not at all; against biases of another rank's heads."""
    model, directory = make(tmp_path, family)
    for options, tolerance in (
        ({"dtype": "float32", "kernels": "reference"}, 1e-5),
        ({"dtype": "bfloat16"}, 0.06),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, 0.1),
        ({"dtype": "float32", "quantization": "int8-x3"}, 0.1),
        ({"dtype": "float32", "tensor_parallel_size": 2}, 1e-5),
    ):
        with LLM(str(directory), **options) as llm:
            prompts = PROMPTS[: 5 if family == "Bert" else 4]
            for prompt, found in zip(prompts, of_all(llm, prompts), strict=True):
                expected = states(model, prompt["prompt_token_ids"])
                assert np.abs(found - expected).max() < tolerance, options


@pytest.mark.matrix("states", "JinaBert")
def test_jinas_bert(tmp_path: Path) -> None:
    """Guards against a bias that grows behind the token, slopes of other heads, and halves of the gate that are taken
    for each other. Transformers has no class of it: BERT's computes it, with other modules and a mask of the biases."""
    model, directory = make(tmp_path, "Bert", intermediate_size=80)
    model.embeddings.position_embeddings.weight.data.zero_()
    stored = {name: value for name, value in model.state_dict().items() if "position" not in name}
    for index, layer in enumerate(model.encoder.layer):
        both = torch.randn(160, 48, generator=torch.Generator().manual_seed(index)) / 7
        layer.intermediate = Gate(both)
        names = {"output.dense": "mlp.wo", "output.LayerNorm": "mlp.layernorm"}
        for before, after in names.items():
            for part in ("weight", "bias"):
                name = f"encoder.layer.{index}.%s.{part}"
                stored[name % after] = stored.pop(name % before)
        for part in ("weight", "bias"):
            del stored[f"encoder.layer.{index}.intermediate.dense.{part}"]
        stored[f"encoder.layer.{index}.mlp.gated_layers.weight"] = both
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"architectures": ["JinaBertModel"]}
    config |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"}
    (directory / "config.json").write_text(json.dumps(config))
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])[:, None, None]  # of six heads (Press et al.)
    with LLM(str(directory), dtype="float32") as llm:
        for prompt, found in zip(PROMPTS, of_all(llm), strict=True):
            ids = torch.tensor([prompt["prompt_token_ids"]])
            at = torch.arange(ids.shape[1])
            with torch.no_grad():
                mask = -slopes * (at[:, None] - at).abs()
                expected = model(ids, attention_mask=mask[None]).last_hidden_state[0].numpy()
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


class Gate(torch.nn.Module):
    """The first half of Jina's feed-forward branch: the activated half of the columns times the other half."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, other = (x @ self.weight.T).chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * other


def test_nomics_own_files(tmp_path: Path) -> None:
    """Guards against the names and keys of the checkpoints that Nomic publishes, of which a gate and its values are
    stored the other way round than they are used."""
    model, directory = make(tmp_path, "NomicBert")
    config = json.loads((directory / "config.json").read_text())
    own = {
        "n_embd": 48,
        "n_inner": 80,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 8192,
        "max_trained_positions": CONTEXT,
    }
    own |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "causal": False}
    own |= {"layer_norm_epsilon": 1e-12, "qkv_proj_bias": False, "prenorm": False, "rotary_scaling_factor": None}
    kept = {name: config[name] for name in ("architectures", "model_type", "vocab_size", "type_vocab_size")}
    (directory / "config.json").write_text(json.dumps(kept | own))
    save_file(nomics_own(model), directory / "model.safetensors")
    with LLM(str(directory), dtype="float32") as llm:
        for prompt, found in zip(PROMPTS, of_all(llm), strict=True):
            np.testing.assert_allclose(found, states(model, prompt["prompt_token_ids"]), atol=1e-5, rtol=0)


def test_embeddings_as_sentence_transformers_computes_them(tmp_path: Path) -> None:
    """Guards against another pooling than the checkpoint's, a prompt that is left out, a text cut without its closing
    token, and a length of texts that the checkpoint does not have. The expected values follow its documented steps:
    tokenize and truncate, run the model, take the mean of the states, divide by the length."""
    model, directory = make(tmp_path, "Bert")
    files = {"config_sentence_transformers.json": {"prompts": {"query": "w7 w8 "}, "default_prompt_name": None}}
    files["sentence_bert_config.json"] = {"max_seq_length": 20, "do_lower_case": False}
    files["1_Pooling/config.json"] = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in kinds.items()]
    (directory / "modules.json").write_text(json.dumps(modules))
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(20)
    text, long = "w1 w2 w3", " ".join(WORDS[:40])
    with LLM(str(directory), dtype="float32") as llm:
        assert llm.config.scheduler.max_model_len == 20
        for given, prefix, params in (
            (text, "", PoolingParams()),
            (text, "w7 w8 ", PoolingParams(prompt_name="query")),
            (long, "", PoolingParams(truncate_prompt_tokens=-1)),
        ):
            ids = tokenizer.encode(prefix + given).ids
            mean = states(model, ids).mean(axis=0)
            (found,) = llm.embed(given, params)
            assert found.prompt_token_ids == ids
            assert np.abs(np.array(found.outputs.embedding) - mean / np.linalg.norm(mean)).max() < 1e-6
        (left,) = llm.embed(long, PoolingParams(truncate_prompt_tokens=4, truncation_side="left"))
        assert left.prompt_token_ids == [2, 43, 44, 3]
        refused(lambda: llm.embed(text, PoolingParams(prompt_name="poem")), "prompt_name")
        refused(lambda: llm.embed({"prompt_token_ids": [5]}, PoolingParams(prompt_name="query")), "before a text")
        refused(lambda: llm.embed(long), "exceed the context of 20")


NOMICS_NAMES = {"layers.": "encoder.layers.", "embeddings.LayerNorm": "emb_ln", "self_attn.o_proj": "attn.out_proj"}
NOMICS_NAMES |= {"up_proj": "fc11", "gate_proj": "fc12", "down_proj": "fc2", "post_attention_layernorm": "norm1"}
NOMICS_NAMES["post_mlp_layernorm"] = "norm2"


def nomics_own(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a Nomic BERT under the names of Nomic's own files."""
    stored = model.state_dict()
    for layer in range(2):
        parts = [stored.pop(f"layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        stored[f"encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
    for before, after in NOMICS_NAMES.items():
        stored = {name if after in name else name.replace(before, after): value for name, value in stored.items()}
    return stored


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "the", "dog", "##s", "b", "##ark", "!", ",", "e"]
TEXTS = ["The dogs bark, the dog bark!", "DOGS éé bark", "the   cat\tbarks [unused0]", "犬 dog"]


def write_gguf(path: Path, name: str, stored: dict[str, torch.Tensor], **more: Any) -> None:
    """Write an encoder of two layers, with the vocabulary PIECES and as many others as it has rows."""
    writer = gguf.GGUFWriter(path, name)
    architecture = next(item for item, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    numbers = {"context_length": CONTEXT, "embedding_length": 48, "feed_forward_length": 80, "block_count": 2}
    for key, value in (numbers | {"head_count": 6, "layer_norm_eps": 1e-12, "causal_attention": False} | more).items():
        getattr(writer, f"add_{key}")(value)
    words = [*PIECES, *(f"rest{index}" for index in range(SIZES["vocab_size"] - len(PIECES)))]
    add_wordpiece(writer, words)
    names = gguf.get_tensor_name_map(architecture, 2)
    for key, value in stored.items():
        if not key.startswith("pooler"):
            writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.matrix("GGUF")
@pytest.mark.parametrize("family", ["Bert", "NomicBert"])
def test_gguf_files(family: str, tmp_path: Path) -> None:
    """Guards against a tensor of llama.cpp's files that is taken for another, a pooling that is not the file's, and
    words cut otherwise than by the tokenizer from which the file was made."""
    model, _ = make(tmp_path, family)
    is_nomic, file = family == "NomicBert", tmp_path / "model.gguf"
    own = {"rope_freq_base": 1000.0} if is_nomic else {}
    stored = nomics_own(model) if is_nomic else model.state_dict()
    write_gguf(file, "nomic-bert" if is_nomic else "bert", stored, pooling_type=gguf.PoolingType.CLS, **own)
    oracle = tokenizers.BertWordPieceTokenizer({piece: index for index, piece in enumerate(PIECES)})
    oracle.add_special_tokens(PIECES[:6])
    with LLM(str(file), dtype="float32") as llm:
        for prompt, found in zip(PROMPTS, of_all(llm), strict=True):
            np.testing.assert_allclose(found, states(model, prompt["prompt_token_ids"]), atol=1e-5, rtol=0)
        for text in TEXTS:
            ids = oracle.encode(text).ids
            (found,) = llm.embed(text)
            assert found.prompt_token_ids == ids
            first = states(model, ids)[0]
            np.testing.assert_allclose(found.outputs.embedding, first / np.linalg.norm(first), atol=1e-5)
        encoding = llm.client.tokenizer.encode_pair("dog", "bark")
        assert encoding == (oracle.encode("dog", "bark").ids, 3)


def refused(call: Callable[[], Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        call()


def logits_of(model: Any, ids: list[int], types: list[int] | None = None) -> np.ndarray:
    with torch.no_grad():
        more = {} if types is None else {"token_type_ids": torch.tensor([types])}
        return model(torch.tensor([ids]), **more).logits[0].double().numpy()


@pytest.mark.matrix("classes")
@pytest.mark.matrix("same bits")
@pytest.mark.parametrize(
    "family",
    ["Bert", "Roberta", "NomicBert", "DistilBert", "MPNet", "ModernBert", "Llama", "Qwen3", "Gemma2", "GPT2"],
)
def test_classifiers(family: str, tmp_path: Path) -> None:
    """Guards against a head that reads another token, the tanh that is left out, a softcap or a factor that is only the
    LM head's, a tied embedding in the place of the head; and against bits that chunks and crowds change."""
    sizes = {"n_layer": 2, "n_embd": 48, "n_head": 6, "n_positions": CONTEXT, "vocab_size": 199, "bos_token_id": 1}
    sizes["eos_token_id"] = 2
    more = sizes if family == "GPT2" else {"classifier_pooling": "mean"} if family == "ModernBert" else {}
    model, directory = make(tmp_path, family, "ForSequenceClassification", **LABELS, pad_token_id=0, **more)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 297}
    with LLM(str(directory), threads=1, **options) as llm:
        alone = [llm.classify(prompt)[0].outputs for prompt in PROMPTS]
        for prompt, found in zip(PROMPTS, alone, strict=True):
            logits = logits_of(model, prompt["prompt_token_ids"])
            expected = np.exp(logits - logits.max())
            np.testing.assert_allclose(found.probs, expected / expected.sum(), atol=1e-5, rtol=0)
        assert alone[0].num_classes == 3
        (plain,) = llm.encode(PROMPTS[1], PoolingParams(use_activation=False))
        np.testing.assert_allclose(plain.outputs.data, logits_of(model, PROMPTS[1]["prompt_token_ids"]), atol=1e-4)
        (tokens,) = llm.encode(PROMPTS[2], pooling_task="token_classify")
        assert tokens.outputs.data.shape == (40, 3)
        at = {"CLS": 0, "LAST": -1}.get(llm.client.model_info.pooler.pooling_type)
        if at is not None:
            np.testing.assert_array_equal(tokens.outputs.data[at], np.array(alone[2].probs, np.float32))
        refused(lambda: llm.embed(PROMPTS[1]), "does not embed: it is a classifier")
        refused(lambda: llm.generate(PROMPTS[1]), "it gives classes")
        refused(lambda: llm.score("w1", "w2"), "3 labels scores no pairs")
        refused(lambda: llm.classify(PROMPTS[1], PoolingParams(dimensions=2)), "dimensions")
    chunked = {"max_num_batched_tokens": 297 if family in FAMILIES else 13}
    with LLM(str(directory), threads=2, **options, **chunked) as crowd:
        found = [item.outputs.probs for item in crowd.classify(PROMPTS * 2)]
        assert found == [item.probs for item in alone * 2]


@pytest.mark.matrix("classes of tokens")
@pytest.mark.parametrize("family", ["Roberta", "DistilBert", "ModernBert"])
def test_classes_of_tokens(family: str, tmp_path: Path) -> None:
    """Guards against one answer for a text where each token has its own, and a head with a product that it lacks."""
    model, directory = make(tmp_path, family, "ForTokenClassification", **LABELS)
    with LLM(str(directory), dtype="float32") as llm:
        for prompt, output in zip(PROMPTS, llm.encode(PROMPTS, PoolingParams(use_activation=False)), strict=True):
            logits = logits_of(model, prompt["prompt_token_ids"])
            np.testing.assert_allclose(output.outputs.data, logits, atol=1e-5, rtol=0)
        refused(lambda: llm.classify(PROMPTS[1]), "token_classify")


@pytest.mark.matrix("pairs")
@pytest.mark.parametrize("family", ["Bert", "Roberta", "Llama"])
def test_cross_encoders(family: str, tmp_path: Path) -> None:
    """Guards against texts of a pair that the model does not tell apart: the second one's type, and the tokens between
    both; against a sigmoid where the checkpoint has none; and against pairs that are mixed up."""
    more = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"} if family == "Bert" else {}
    model, directory = make(tmp_path, family, "ForSequenceClassification", **ONE_LABEL, pad_token_id=0, **more)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = ["w1 w2 w3", "w9", "w1 w2 w4 w8 w16 w32"]

    def expected(first: str, second: str, cut: int = CONTEXT) -> float:
        encoding = tokenizer.encode(first, second)
        ids, types = encoding.ids, encoding.type_ids
        if len(ids) > cut:
            ids, types = [*ids[: cut - 1], ids[-1]], types[:cut]
        logit = float(logits_of(model, ids, types if family == "Bert" else None)[0])
        return logit if more else 1 / (1 + np.exp(-logit))

    with LLM(str(directory), dtype="float32", max_model_len=130) as llm:
        found = [item.outputs.score for item in llm.score("w5 w6", texts)]
        assert found == pytest.approx([expected("w5 w6", text) for text in texts], abs=1e-5)
        pairs = [item.outputs.score for item in llm.score(texts, texts[::-1])]
        assert pairs == pytest.approx([expected(*pair) for pair in zip(texts, texts[::-1], strict=True)], abs=1e-5)
        alone = [llm.score(*pair)[0].outputs.score for pair in zip(texts, texts[::-1], strict=True)]
        assert alone == pairs  # two of them are of one length, so that a recorded pass comes again with other types
        (cut,) = llm.score("w5 w6", texts[2], PoolingParams(truncate_prompt_tokens=7))
        assert len(cut.prompt_token_ids) == 7
        assert cut.outputs.score == pytest.approx(expected("w5 w6", texts[2], 7), abs=1e-5)
        assert len(set(found)) == 3
        refused(lambda: llm.score({"prompt_token_ids": [5]}, "w1"), "text_1")
        refused(lambda: llm.score("", "w1"), "text_1")


def test_what_an_encoder_cannot_do(tmp_path: Path) -> None:
    """Guards against an option or a call that an encoder takes and that changes nothing, or breaks it."""
    _, directory = make(tmp_path, "Bert")
    name = str(directory)
    with LLM(name) as llm:
        refused(lambda: llm.generate("w1"), "no language-model head")
        refused(lambda: llm.classify("w1"), "no classifier's head")
        refused(lambda: llm.encode("w1", PoolingParams(use_activation=True)), "use_activation")
        refused(lambda: llm.encode("w1", PoolingParams(task="token_embed", pooling_type="CLS")), "pooling_type")
        refused(lambda: llm.pin_prefix(" ".join(WORDS[:20])), "prefix caching is off")
        refused(lambda: llm.forward("w1 w2"), "no head")
    for options, word in (
        ({"max_num_batched_tokens": 64}, "at least max_model_len = 300"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"kv_offload_memory_bytes": 2**20}, "kv_offload_memory_bytes"),
        ({"attention_sinks": 2, "sliding_window": 20}, "attention_sinks"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ):
        refused(lambda options=options: LLM(name, **options), word)
    assert "see the text after them" in why_no_gpu(EngineConfig(), load_model_config(directory), directory)
    with LLM(name, dtype="float32", max_model_len=100) as llm:  # and less than the model's context
        assert llm.config.scheduler.max_num_batched_tokens >= 100
        refused(lambda: llm.embed(PROMPTS[4]), "exceed the context of 100")


def test_configs(tmp_path: Path) -> None:
    """Guards against keys that would change what is computed and are read over."""
    _, directory = make(tmp_path, "Bert", "ForSequenceClassification", **ONE_LABEL)
    config = json.loads((directory / "config.json").read_text())
    for change, activation in (
        ({}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "single_label_classification", **LABELS}, "softmax"),
        ({"problem_type": "multi_label_classification", **LABELS}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, **LABELS}, "sigmoid"),
    ):
        (directory / "config.json").write_text(json.dumps(config | change))
        model = load_model_config(directory)
        assert (model.label_activation, len(model.labels)) == (activation, 3 if "id2label" in change else 1)
    for change, word in (
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"id2label": {"1": "x"}}, "id2label"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "activation"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
    ):
        (directory / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=word):
            load_model_config(directory)
    scaled = transformers.GraniteConfig(**TINY, logits_scaling=8.0, architectures=["GraniteForSequenceClassification"])
    assert parse_model_config(json.loads(scaled.to_json_string())).logit_scale == 1.0  # which is the LM head's alone
