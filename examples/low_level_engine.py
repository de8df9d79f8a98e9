"""Run the engine step by step: add requests at any time, inspect each step, abort a request."""

from penstock import LLM, SamplingParams

with LLM(model="demo") as llm:
    engine = llm.engine
    engine.add_request("story", "Once upon a time", SamplingParams(temperature=0.0, max_tokens=12))
    engine.add_request("endless", "One day", SamplingParams(max_tokens=500, ignore_eos=True))
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():  # a RequestOutput for every request that has a new token
            if output.finished:
                print(f"step {steps}: {output.request_id} finished: {output.outputs[0].text}")
        steps += 1
        if steps == 4:
            engine.add_request("late", "The dog", SamplingParams(temperature=0.0, max_tokens=4))
        if steps == 20:
            print(f"step {steps}: abort endless: {engine.abort('endless')}")
