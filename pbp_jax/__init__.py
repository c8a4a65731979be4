"""A simulator of asynchronous pipelined training."""
