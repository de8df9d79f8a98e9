"""Other projects' calling conventions and quick starts on top of penstock.LLM. The engine does not import them.

colossalai        InferenceConfig, InferenceEngine, register_logit_processor
falcon            DecodeBackend, with the arguments that the document of Falcon's decode backend prints
jetstream         Environment, AttentionKernel, and models written as forward(tokens, input_pos, caches, mask)
run_interactive   python -m penstock_lab.compat.run_interactive --size=7b --model=gemma ...
"""
