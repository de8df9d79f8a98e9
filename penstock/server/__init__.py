"""HTTP only: OpenAI's routes over any EngineClient. Imports neither torch nor transformers.

`serve` runs the application under uvicorn. A request passes `middleware` (id, log line, key, body limits) and is routed
by `app`; `openai_requests` decodes it strictly, after `unsupported` has refused what is not built; `inputs` makes
prompts and SamplingParams of it; `generation` runs it, and aborts it when the client disconnects; `completions` shapes
the answer from `openai_responses`.
"""
