"""OpenAI's own client, as users have it."""

import openai

from penstock_lab.prove.servers import QUICK


def official_client(url: str, key: str = "x") -> openai.OpenAI:
    """Connect it to a server, without retries."""
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=openai.DefaultHttpxClient(**QUICK)
    )
