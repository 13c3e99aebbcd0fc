"""The single checks behind ``sinkflex.envs.checker``, by what they look at."""
