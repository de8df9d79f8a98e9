"""Other projects' calling conventions for the engine's arithmetic, spelled out for tests and for the documents.

    caches        JetStream's CacheInterface over the paged cache and five plain stores
    jetstream     JetStream's forward(tokens, input_pos, caches, mask) as a model of the engine
    incre_flash   the argument list of Huawei's IncreFlashAttention operator, in plain torch
    rolling       the masks and the rolling buffer of Mistral's reference inference

The engine's own path does not come here, except that weights/loader.py builds and wraps a model that is registered with
convention="jetstream".
"""
