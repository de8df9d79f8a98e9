"""The real engine on a virtual clock, for `penstock simulate`. No torch and no weights.

    arrivals      which requests come, and when: drawn, from a file, or from users who wait for their answers
    costs         seconds of a step, fitted to measured steps, which `recorded` reads from a flight recorder's file
                  or measures
    replica       one engine, as assembly makes it, with an executor that sets its clock forward by what a step costs;
                  `leap` takes many steps at once while nothing is decided
    fleet         several replicas behind a router, in order of time
    figures       streaming percentiles; no request is kept
    scenario      a load and a fleet; the smallest fleet for a target

`run` goes from options to figures, in several processes if wanted, which `report` prints and draws.
"""
