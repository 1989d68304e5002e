"""A whole program: the config from the command line, then training, evaluation, prediction or a dry run."""
