"""The engines that can be compared, each in a file of its own."""

from benchmarks.peers.base import Peer
from benchmarks.peers.llama_cpp import IkLlamaCpp, LlamaCpp
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.penstock import Penstock
from benchmarks.peers.transformers import Transformers
from benchmarks.peers.vllm import Vllm

OURS = Penstock.name
PEERS: tuple[type[Peer], ...] = (Penstock, LlamaCpp, IkLlamaCpp, Vllm, OpenVino, Transformers)
ALL = {peer.name: peer for peer in PEERS}


def find(name: str) -> Peer:
    """Return the peer with a name.

    Raises:
        ValueError: there is no such peer.
    """
    if name not in ALL:
        raise ValueError(f"peers: {name!r} is none of {', '.join(ALL)}")
    return ALL[name]()
