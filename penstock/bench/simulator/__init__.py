"""The real engine on a virtual clock: `penstock simulate`. No torch and no weights.

    arrivals      which requests come, and when: drawn, from a file, or from users who wait for their answers
    executor      what stands in for the model: a step takes as long as its costs say, and the clock is set forward
    costs         seconds of a step, fitted to measured ones, which `recorded` reads from a flight recorder's file,
                  and `calibrate` measures
    replica       one engine, as assembly makes it; `leap` takes many steps at once where nothing is decided
    fleet         several replicas behind a router, in order of time
    figures       streaming percentiles; no request is kept
    scenario      a load and a fleet; the smallest fleet for a target; `workers` shares it out to processes

`run` goes from options to figures, which `report` prints and draws.
"""
