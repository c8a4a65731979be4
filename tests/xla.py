"""How XLA compiles in the tests."""

# What is tested are numbers, not speed: to compile quickly takes half the time.
# XLA ends a process that gives it a flag which it does not know any more.
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=0"

# For tests of what XLA makes of a program: as it does for everybody else.
AS_ELSEWHERE = {
  "xla_backend_optimization_level": 3,
  "xla_cpu_use_fusion_emitters": True,
}
