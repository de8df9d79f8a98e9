"""The fallback: a decoder of Transformers that has no folder here is computed by Transformers' own modules.

derive   what a class and its config.json make: the numbers of ModelConfig, and the parameter table
probe    runs a class without values, and notes what its attention layers pass on
model    the modules, with the engine's products, embedding and attention in place of theirs
Only these three files import transformers, and they are imported only for such a model.
"""

ADOPTED: dict[str, type] = {}  # a program's own classes that derive from decoders of Transformers, by architecture
