"""`make demo`: streams a story from the bundled model, then prints its speed and what to try next."""

import sys
import time

from penstock.cli.terminal import note

PROMPT = "Once upon a time"
NEXT_STEPS = """
Next steps:
  .venv/bin/penstock chat                                   talk to the demo model
  .venv/bin/penstock generate demo -p "Once upon a time"    another story
  .venv/bin/penstock serve                                  the OpenAI API and a web page on http://127.0.0.1:8000
  .venv/bin/penstock serve /path/to/a/hugging-face-model    your own model
"""


def main() -> int:
    note("Penstock: the bundled demo model, on this machine's CPU\n")
    started = time.perf_counter()
    from penstock.client.llm import LLM
    from penstock.interface.sampling_params import RequestOutputKind

    with LLM(model="demo") as llm:
        loaded = time.perf_counter()
        params = llm.get_default_sampling_params(seed=7, max_tokens=300, output_kind=RequestOutputKind.DELTA)
        sys.stdout.write(PROMPT)
        count, first = 0, 0.0
        for _, output in llm.stream([PROMPT], params):
            first = first or time.perf_counter()
            count += len(output.outputs[0].token_ids)
            sys.stdout.write(output.outputs[0].text)
            sys.stdout.flush()
    seconds = time.perf_counter() - first
    print(
        f"\n\n{count} tokens, {(count - 1) / seconds:.0f} tokens/s after the first; first token after "
        f"{1000 * (first - loaded):.0f} ms, loading took {loaded - started:.1f} s"
    )
    print(NEXT_STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
