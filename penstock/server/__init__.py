"""HTTP only: OpenAI's routes over any EngineClient. Imports neither torch nor transformers.

A request comes in through `middleware` (id, log line, key, body limits), `app` routes it, `openai_requests` decodes it
strictly, `sampling` makes SamplingParams of it, `generation` runs it and stops it when the caller goes away, and
`completions` or `chat` shapes the answer (`openai_responses`), streamed by `sse`. `serve` runs all this under uvicorn.
"""
