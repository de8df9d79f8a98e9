"""Share a long prefix: the second prompt reuses the cached blocks of the first, so only its new part is computed."""

from penstock import LLM, SamplingParams

story = "Once upon a time there was a clever boy named Nico. Nico had a small room under the roof. " * 8
params = SamplingParams(temperature=0.0, max_tokens=8)

with LLM(model="demo") as llm:
    for ending in ("One day", "One day", "In the evening"):
        output = llm.generate(story + ending, params)[0]
        cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"{cached:3} of {total} prompt tokens were cached; answer: {output.outputs[0].text!r}")
