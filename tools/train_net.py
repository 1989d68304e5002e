#!/usr/bin/env python
"""Train or evaluate the model that a config file describes, or predict with it.

    python tools/train_net.py --config-file configs/digits/convnet.yaml
    python tools/train_net.py --config-file configs/digits/convnet.yaml --num-gpus 2
    torchrun --nproc-per-node 2 tools/train_net.py --config-file configs/digits/convnet.yaml

For a model, data or hooks of your own, name them in the config ("my_package.nets:Net"), or copy this script and
override methods of Trainer.
"""

from hookline.command_line import default_argument_parser, slow_imports

if __name__ == "__main__":
    default_argument_parser().parse_args()  # first: --help and misspelt options are answered at once

with slow_imports():
    from hookline.engine import DefaultTrainer, run


class Trainer(DefaultTrainer):
    """Override its ``build_*`` methods to replace parts: the model, the data, the optimizer, the hooks."""


if __name__ == "__main__":
    run(Trainer, default_argument_parser().parse_args())
