"""The NumPy twin of the simulator: a pipeline with real wires, by ticks.

`timetables` says who computes what at which tick, `stages` what a stage
computes, `optimizers` how weights are updated and seen, and `pipeline` runs
it. Nothing here uses jax or pbp_jax.
"""
