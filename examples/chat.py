"""Chat with a model: its chat template renders the history of the conversation."""

from penstock import LLM, SamplingParams

questions = ["What is 3 + 4?", "Name three fruits."]
messages: list[dict[str, str]] = []

with LLM(model="demo") as llm:
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64))[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
