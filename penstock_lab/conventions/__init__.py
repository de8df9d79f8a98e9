"""Other projects' calling conventions for the engine's arithmetic, as a reference for tests and documentation.

    caches        JetStream's CacheInterface over the paged cache and five plain stores
    jetstream     JetStream's forward(tokens, input_pos, caches, mask) as a model of the engine
    falcon        the graph of Tenstorrent's Falcon decode backend, as a version of Falcon
    incre_flash   the argument list of Huawei's IncreFlashAttention operator, on the engine's operator or in plain torch
    rolling       the masks and the rolling buffer of Mistral's reference inference

The engine finds jetstream through an entry point, for models that are registered with convention="jetstream".
"""
