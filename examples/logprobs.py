"""Show how likely each token was, in the answer and in the prompt."""

from math import exp

from penstock import LLM, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=0)

with LLM(model="demo") as llm:
    output = llm.generate("Once upon a time there was", params)[0]

print("prompt:")
for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
    if entry is not None:  # the first token has no entry, because nothing comes before it
        found = entry[token_id]
        print(f"  {found.decoded_token!r:12} {exp(found.logprob):6.1%}  rank {found.rank}")
print("answer, with the three most likely tokens:")
for entry in output.outputs[0].logprobs:
    print("  " + "  ".join(f"{item.decoded_token!r} {exp(item.logprob):.1%}" for item in entry.values()))
