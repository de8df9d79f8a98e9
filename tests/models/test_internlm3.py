"""InternLM3, whose class is not part of Transformers: it is Llama under other names of switches."""

import json
from pathlib import Path

import torch

from penstock.models.config_json import load_model_config
from tests.hf_models import hf_logprobs, make_llama, random_ids
from tests.paged import PagedModel


def test_it_computes_what_llama_does(tmp_path: Path) -> None:
    """Guards against biases that are left out, and against dynamic scaling that is not read."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    sizes = {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "max_position_embeddings": 64}
    model, directory = make_llama(tmp_path, rope_parameters=scaling | {"rope_theta": 1e4}, **sizes)
    config = json.loads((directory / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias", "rope_parameters", "pretraining_tp"):
        del config[key]
    config |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": True}
    (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 1e4, "rope_scaling": scaling}))
    ids = random_ids(60)
    found = PagedModel(directory, kernels="reference").step({0: ids})[0]
    torch.testing.assert_close(found, hf_logprobs(model, ids), atol=1e-4, rtol=0)
    rope = load_model_config(directory).rope
    assert rope is not None
    assert (rope.rope_type, rope.factor) == ("dynamic", 4.0)
