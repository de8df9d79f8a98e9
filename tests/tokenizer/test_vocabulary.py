"""tokenizer.model and tekken.json, read as they are, against sentencepiece and the rule of tiktoken."""

import base64
import io
import json
import random
import re
from contextlib import suppress
from itertools import pairwise

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.text import TextWorker
from penstock.errors import ModelLoadError
from penstock.tokenizer.hf import load_tokenizer
from tests.tokenizer.vocabularies import TEXT, check_only_decodes

MODELS = {
    "as Llama 2": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "as Gemma": {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<note>", "\u2581\u2581", "\u2581\u2581\u2581", "\n\n"],
    },
    "unigram with bytes": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "byte_fallback": False},
}
HARD = [
    "",
    " ",
    "  ",
    " a",
    "a  b ",
    "\n\n x",
    "----====",
    "aaaa aaaaa",
    "\ufb01 \u2460 \u00e9 \u4f60 \U0001f642",
    "a<note>b",
]


def train(**options):
    """Return the bytes of a small model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 4),
        model_writer=model,
        **{"vocab_size": 420, "byte_fallback": True, "control_symbols": ["[INST]"], **options},
        num_threads=1,
        hard_vocab_limit=False,
        minloglevel=9,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def llama():
    return train(**MODELS["as Llama 2"])


@pytest.fixture(params=MODELS, scope="module")
def both(request, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("model"), train(**MODELS[request.param])
    (folder / "tokenizer.model").write_bytes(data)
    return load_tokenizer(folder), sentencepiece.SentencePieceProcessor(model_proto=data)


def write(folder, data, name="tokenizer.model", **config):
    (folder / name).write_bytes(data)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class TestSentencePiece:
    @pytest.mark.matrix("ids", "`tokenizer.model`")
    @pytest.mark.matrix("texts", "`tokenizer.model`")
    @settings(max_examples=200)
    @given(
        text=st.one_of(
            st.sampled_from([*HARD, *TEXT]), st.text("ab \n-=.\u00e9\u4f60", max_size=40), st.text(max_size=20)
        )
    )
    def test_equals_its_library(self, both, text):
        """Guards against another order of merges, lost or doubled spaces, and characters that are not normalised."""
        ours, theirs = both
        ids = theirs.encode(text)
        if text.startswith("<note>"):  # the library puts a space before it
            return
        assert ours.encode(text, add_special_tokens=False) == ids
        if 0 not in ids:  # an unknown character, for which the library writes two question marks
            assert ours.decode(ids) == theirs.decode(ids)

    @pytest.mark.matrix("BOS and EOS", "`tokenizer.model`")
    def test_bos_is_kept(self, tmp_path, llama):
        """Guards against prompts without BOS, which a conversion by Transformers gives."""
        ids = sentencepiece.SentencePieceProcessor(model_proto=llama).encode("a fox")
        tok = load_tokenizer(write(tmp_path, llama))
        assert (tok.bos_token_id, tok.eos_token_id) == (1, 2)
        assert tok.encode("a fox") == [1, *ids]
        assert load_tokenizer(write(tmp_path, llama, add_bos_token=False)).encode("a fox") == ids
        tok = load_tokenizer(write(tmp_path, llama, add_eos_token=True, bos_token="<s>"))
        assert tok.encode("a fox") == [1, *ids, 2]
        assert tok.encode("a fox", add_special_tokens=False) == ids

    def test_decoding_needs_no_merges(self, tmp_path, llama):
        """Guards against streams whose text depends on what only prompts need, and against loading that."""
        check_only_decodes(write(tmp_path, llama), HARD)

    def test_control_tokens(self, tmp_path, llama):
        """Guards against templates whose control tokens are split, and spaces added after each of them."""
        inst = sentencepiece.SentencePieceProcessor(model_proto=llama).piece_to_id("[INST]")
        tok = load_tokenizer(write(tmp_path, llama))
        (*rest, first, second) = tok.encode("a[INST] a")
        assert first == inst
        assert second == tok.encode("a")[-1]
        assert rest == tok.encode("a")
        every = load_tokenizer(write(tmp_path, llama, legacy=True))
        assert every.encode("[INST]a") == [1, inst, second]
        assert tok.encode("[INST]a") != [1, inst, second]
        assert tok.decode([1, inst, second]) == "a"

    def test_a_name_with_a_version(self, tmp_path, llama):
        """Guards against Mistral's tokenizer.model.v3 being overlooked, and against it replacing a newer format."""
        write(tmp_path, llama, "tokenizer.model.v3")
        worker = TextWorker(tmp_path)
        try:
            worker.load()
            ids = worker.call("encode_all", [["a fox"]], {"add_special_tokens": True}, num_chars=5)
        finally:
            worker.close()
        assert ids == [load_tokenizer(tmp_path).encode("a fox")]
        write(tmp_path, b"{}", "tekken.json")
        with pytest.raises(ModelLoadError, match=r"tekken\.json: is not a valid tekken\.json: 'config' is missing"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "holds no pieces"),
            (b"x", "not a valid SentencePiece model"),
            (b"IQ== 0\nIg== 1\n", "tiktoken's format"),
            (b"\x0a\x03\x0a\x01a\x0a\x03\x0a\x01a\x12\x02\x18\x02", "piece 'a' is there twice"),
            (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "type 3 is not supported"),
            (b"\x0a\x03\x0a\x01a\x12\x02\x18\x01", "unknown characters"),
            (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01", "spaces after words"),
            (b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f", "score nan"),
            (b"\x0a\x03\x0a\x01\xff", "utf-8"),
            (b"\x0a\x05\x0a\x01a\x10\x01", "field 2 is not a text"),
        ],
    )
    def test_damaged(self, tmp_path, data, message):
        """Guards against errors of parsing that do not name the file, and a type that is read as another."""
        with pytest.raises(ModelLoadError, match=rf"(?s)tokenizer\.model: .*{message}"):
            load_tokenizer(write(tmp_path, data))

    @pytest.mark.parametrize("kind", ["as Llama 2", "unigram"])
    def test_mutated(self, tmp_path, kind):
        """Guards against a stranger's file that ends the process or raises anything but one line."""
        sound, rng = train(**MODELS[kind]), random.Random(7)
        for _ in range(150):
            data = bytearray(sound)
            for _ in range(rng.choice((1, 3, 30))):
                data[rng.randrange(len(data))] = rng.choice((0, 0xFF, rng.randrange(256)))
            write(tmp_path, bytes(data[: rng.choice((len(data), rng.randrange(len(data))))]))
            with suppress(ModelLoadError):
                load_tokenizer(tmp_path).encode("a fox")


def tekken(special=None):
    """Return the contents of a small tekken.json with 10 special tokens."""
    found = [bytes([byte]) for byte in range(256)]
    for word in " ".join(TEXT).encode().split():
        found += [word[:size] for size in range(2, len(word) + 1)] + [word[at : at + 2] for at in range(len(word) - 1)]
    words = list(dict.fromkeys(found))
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(words)]
    config = {
        "pattern": r"[a-z]+| ?[^\sa-z]+|\s",
        "default_vocab_size": 10 + len(words) - 5,
        "default_num_special_tokens": 10,
    }
    return {"config": config, "vocab": vocab, **({} if special is None else {"special_tokens": special})}


def by_ranks(ranks, word):
    """Merge the pair with the lowest rank, the first one of several, until no pair is in the vocabulary."""
    parts = [bytes([byte]) for byte in word]
    while word not in ranks or len(parts) > 1:
        if word in ranks:
            return [ranks[word]]
        found = [(ranks[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            break
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    data = json.dumps(tekken()).encode()
    return load_tokenizer(write(tmp_path_factory.mktemp("tekken"), data, "tekken.json"))


class TestTekken:
    @pytest.mark.matrix("ids", "`tekken.json`")
    @pytest.mark.matrix("texts", "`tekken.json`")
    @settings(max_examples=200)
    @given(text=st.text("abcdefghijklmnopqrstuvwxyz\u00e9\u4f60", min_size=1, max_size=30))
    def test_merges_by_ranks(self, small, text):
        """Guards against another order of merges than tiktoken's, and ids that do not follow the special tokens."""
        contents = tekken()
        kept = contents["vocab"][: contents["config"]["default_vocab_size"] - 10]
        ranks = {base64.b64decode(token["token_bytes"]): 10 + token["rank"] for token in kept}
        words = re.findall(r"[a-z]+|[^\sa-z]+", text)
        ids = [token_id for word in words for token_id in by_ranks(ranks, word.encode())]
        assert small.encode(text) == [1, *ids]
        assert small.decode([1, *ids]) == text

    def test_decoding_needs_no_merges(self, tmp_path):
        """Guards against streams whose text depends on what only prompts need, and against loading that."""
        check_only_decodes(write(tmp_path, json.dumps(tekken()).encode(), "tekken.json"), HARD)

    @pytest.mark.matrix("BOS and EOS", "`tekken.json`")
    def test_special_tokens(self, tmp_path):
        """Guards against special tokens at the wrong ids: listed, those of older files, without a name."""
        tok = load_tokenizer(write(tmp_path, json.dumps(tekken()).encode(), "tekken.json"))
        assert tok.encode("[INST][TOOL_CALLS]", add_special_tokens=False) == [3, 9]
        listed = [{"rank": 1, "token_str": "<s>", "is_control": True}, {"rank": 4, "token_str": "[THINK]"}]
        tok = load_tokenizer(write(tmp_path, json.dumps(tekken(listed)).encode(), "tekken.json"))
        assert tok.encode("[THINK]<SPECIAL_5>") == [1, 4, 5]
        assert tok.vocab_size == tekken()["config"]["default_vocab_size"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"vocab": []}, "does not hold"),
            ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "base64"),
            ({"config": {"pattern": "("}}, "default_vocab_size"),
            ({"config": tekken()["config"] | {"pattern": "("}}, "not a valid tokenizer"),
            ({"config": tekken()["config"] | {"default_vocab_size": 2**40}}, "default_vocab_size = 1099511627776"),
            ({"special_tokens": [{"rank": 10, "token_str": "x"}]}, "special_tokens"),
            ({"special_tokens": [{"rank": 0, "token_str": "<SPECIAL_1>"}]}, "twice"),
            ({"special_tokens": 5}, "int"),
        ],
    )
    def test_damaged(self, tmp_path, change, message):
        """Guards against errors that do not name the file."""
        data = json.dumps(tekken() | change).encode()
        with pytest.raises(ModelLoadError, match=rf"tekken\.json: .*{message}"):
            load_tokenizer(write(tmp_path, data, "tekken.json"))
