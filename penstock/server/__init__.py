"""The HTTP server: OpenAI's routes over any EngineClient. Imports neither torch nor transformers.

`serve` runs the application under uvicorn. A request passes `middleware` (id, log line, key, body limits) and is routed
by `app`. `openai_requests` decodes its body strictly, and refuses the parameters that are not built. `inputs` turns it
into prompts and SamplingParams. `generation` runs it, and aborts it when the client disconnects. `completions` forms
the answer from the types of `openai_responses`.
"""
