"""Use the official OpenAI client (pip install openai). First start a server in another terminal:

penstock serve demo --port 8000
"""

import os

from openai import OpenAI

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{url}/v1", api_key="x") as client:
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    print(answer.choices[0].message.content)

    stream = client.completions.create(
        model="demo",
        prompt="Once upon a time",
        max_tokens=24,
        stream=True,
        extra_body={"top_k": 20},  # vLLM's fields that OpenAI does not have
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()
