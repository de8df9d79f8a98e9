"""Several processes that compute one model. The engine sees them as an Executor; model files do not know of them.

The ranks of a group share every layer, the stages of a pipeline have some layers each, and a stage may be a group.

build              from a resolved config to the executor; process: what a started process runs
group, pipeline    the two executors            launcher, links     processes and their connections
sharding           a rank's part of each parameter (sharding_map: as a file says)
layers, stage      the layers of a part, and the runners that compute it
children, child_main   start and watch a child process of any kind; the client uses them too
"""
