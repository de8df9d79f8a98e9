"""Generate text for a list of prompts."""

from penstock import LLM, SamplingParams

prompts = ["Once upon a time", "One day", "The dog"]
params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)

with LLM(model="demo") as llm:  # or a Hugging Face directory
    for output in llm.generate(prompts, params):
        choice = output.outputs[0]
        print(f"{output.prompt!r} -> {choice.text!r} ({choice.finish_reason})")
