"""OpenAI's, Anthropic's and Ollama's own clients, as users have them."""

from typing import Any

import openai
import pytest

from penstock_lab.prove.servers import QUICK


def official_client(url: str, key: str = "x") -> openai.OpenAI:
    """Connect it to a server, without retries."""
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(**QUICK)
    )


def anthropic_client(url: str, key: str = "x", **options: Any) -> Any:
    """Connect it to a server, without retries. Skip the test where the client is not installed."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client of the test extra is not installed")
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, **options)


def ollama_client(url: str, key: str = "x") -> Any:
    """Connect it to a server. Skip the test where the client is not installed."""
    ollama = pytest.importorskip("ollama", reason="the ollama client of the test extra is not installed")
    return ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"}, **QUICK)
