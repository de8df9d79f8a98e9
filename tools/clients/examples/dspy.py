# /// script
# dependencies = ["dspy==3.4.1", "numpy==2.4.6"]
# ///
"""DSPy, through LiteLLM."""

import dspy
import litellm
from features import KEY, MODEL, QUESTION, Server, check, check_vectors

litellm.register_model({f"openai/{MODEL}": {"litellm_provider": "openai", "supports_response_schema": True}})


class Add(dspy.Signature):
    """Add two numbers."""

    question: str = dspy.InputField()
    a: int = dspy.OutputField()
    b: int = dspy.OutputField()


def model(server: Server) -> dspy.LM:
    fields = {"api_base": server.v1, "api_key": KEY, "temperature": 0, "max_tokens": 200, "cache": False}
    return dspy.LM(f"openai/{MODEL}", engine="litellm", **fields)  # which can be told that the server takes schemas


def chat(server: Server) -> None:
    check(model(server)(QUESTION)[0])


def structured(server: Server) -> None:
    with dspy.context(lm=model(server), adapter=dspy.JSONAdapter()):
        check(type(dspy.Predict(Add)(question=QUESTION).b).__name__, "int")


def embeddings(server: Server) -> None:
    check_vectors(dspy.Embedder(f"openai/{MODEL}", api_base=server.v1, api_key=KEY)(["a cat", "a boat"]).tolist(), 2)
