"""Run an agent that calls functions (needs: pip install openai). First start a server in another terminal:

penstock serve demo --port 8000
"""

import json
import os

from openai import OpenAI

WEATHER = {"Paris": {"temperature": 18, "sky": "sun"}, "Oslo": {"temperature": 4, "sky": "rain"}}
FUNCTIONS = {"add": lambda a, b: a + b, "weather": lambda city: {"city": city} | WEATHER.get(city, {})}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ARGUMENTS = {"add": {"a": NUMBER, "b": NUMBER}, "weather": {"city": {"type": "string", "maxLength": 20}}}


def tool(name: str) -> dict:
    schema = {"type": "object", "properties": ARGUMENTS[name], "required": list(ARGUMENTS[name])}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


def converse(client: OpenAI, question: str, most_turns: int = 12, **first) -> list[dict]:
    """Return the whole conversation. `first` has extra parameters (tool_choice, ...) for the first call only."""
    messages, tools = [{"role": "user", "content": question}], [tool(name) for name in FUNCTIONS]
    for turn in range(most_turns):
        options = {"tools": tools, "temperature": 0, **(first if turn == 0 else {})}
        answer = client.chat.completions.create(model="demo", messages=messages, **options).choices[0]
        messages.append(answer.message.to_dict())
        for call in answer.message.tool_calls or []:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
        if answer.finish_reason != "tool_calls":
            break
    return messages


if __name__ == "__main__":
    with OpenAI(base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1", api_key="x") as openai:
        for message in converse(openai, "What is 3 + 4?"):
            print(message["role"], message.get("content") or message["tool_calls"][0]["function"])
