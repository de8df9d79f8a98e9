"""Change the logits of a request with a function of your own. This one forbids some tokens.

For `AsyncLLM` and `penstock serve`, pass the file that registers it: --import examples/logits_processor.py
"""

import penstock
from penstock import LLM, SamplingParams


@penstock.register_logits_processor("forbid")
def forbid(logits, args):  # logits: [1, vocabulary] float32, of one sequence; args: from the request
    logits[:, args] = float("-inf")
    return logits


if __name__ == "__main__":
    with LLM(model="demo") as llm:
        free = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0]
        params = SamplingParams(temperature=0.0, max_tokens=12, logits_processors={"forbid": free.token_ids[:3]})
        bound = llm.generate("Once upon a time", params)[0].outputs[0]
    print("free:     ", free.text)
    print("forbidden:", bound.text)
