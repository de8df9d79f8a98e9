"""The HTTP server: OpenAI's routes over any EngineClient. Imports neither torch nor transformers.

`serve` runs the application under uvicorn. A request passes `middleware` (id, log line, key, body limits) and is routed
by `app`. `unsupported` refuses what is not built, and `openai_requests` decodes the rest strictly. `inputs` turns it
into prompts and SamplingParams. `generation` runs it, and aborts it when the client disconnects. `completions` forms
the answer from the types of `openai_responses`.
"""
