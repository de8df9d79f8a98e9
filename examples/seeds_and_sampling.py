"""Sample several answers, then reproduce them in another batch: same request, same seed, same tokens."""

from penstock import LLM, SamplingParams

params = SamplingParams(n=3, temperature=1.0, top_k=50, min_p=0.02, repetition_penalty=1.1, max_tokens=24)

with LLM(model="demo") as llm:
    first = llm.generate("Once upon a time", params)[0]
    for choice in first.outputs:
        print(choice.index, choice.text)

    print("the seed was", first.seed)  # assigned, because none was given
    same = SamplingParams(
        n=3, temperature=1.0, top_k=50, min_p=0.02, repetition_penalty=1.1, max_tokens=24, seed=first.seed
    )
    crowd = llm.generate(["One day", "The dog", "Once upon a time"], [params, params, same])
    again = crowd[2]

tokens = [choice.token_ids for choice in first.outputs]
print("the same tokens in a batch:", tokens == [choice.token_ids for choice in again.outputs])
