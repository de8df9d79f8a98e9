"""Stream three answers at once, with the engine in a separate process."""

import asyncio

from penstock import AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ["Once upon a time", "One day", "The dog"]


async def answer(llm: AsyncLLM, prompt: str) -> None:
    """Print each piece of text as it arrives."""
    params = SamplingParams(temperature=0.0, max_tokens=16, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        print(f"{prompt}: {output.outputs[0].text!r}")


async def main() -> None:
    async with AsyncLLM(model="demo") as llm:
        await asyncio.gather(*(answer(llm, prompt) for prompt in PROMPTS))


if __name__ == "__main__":
    asyncio.run(main())
