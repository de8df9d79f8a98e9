"""The version "plain" of Llama's architectures: torch's own layers in JetStream's convention. Imports no torch."""

from pathlib import Path

from penstock.models.registry import ModelVersion

PLAIN_LLAMA = ModelVersion(
    "penstock_lab.conventions.plain_llama.PlainLlama", Path(__file__).parent / "plain_llama.yaml", "jetstream"
)
VERSIONS = {"LlamaForCausalLM": PLAIN_LLAMA, "MistralForCausalLM": PLAIN_LLAMA}
