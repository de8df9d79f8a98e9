"""Other versions of architectures, for `model_impl`. Imports no torch.

plain            Llama with torch's own layers, in JetStream's convention
efficient-40b    Falcon as the graph of fixed shapes of its decode backend
"""

from pathlib import Path

from penstock.models import registry
from penstock.models.registry import ModelVersion

HERE = Path(__file__).parent
EFFICIENT = "efficient-40b"
PLAIN_LLAMA = ModelVersion("penstock_lab.conventions.plain_llama.PlainLlama", HERE / "plain_llama.yaml", "jetstream")


class TorchVersion(ModelVersion):
    """A version in the engine's own convention that computes with torch's tensors."""

    @property
    def needs_torch(self) -> bool:
        return True


FALCON_GRAPH = TorchVersion(
    "penstock_lab.conventions.falcon.RWForCausalLM", Path(registry.__file__).parent / "falcon/table.yaml"
)
VERSIONS = {
    "LlamaForCausalLM": {"plain": PLAIN_LLAMA},
    "MistralForCausalLM": {"plain": PLAIN_LLAMA},
    "FalconForCausalLM": {EFFICIENT: FALCON_GRAPH},
}
