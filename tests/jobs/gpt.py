"""Train a GPT on the bytes of a file, and continue a text."""

from pathlib import Path

import torch

from hookline import Trainer

text = torch.frombuffer(bytearray(Path(__file__).read_bytes() * 8), dtype=torch.uint8).long()
blocks = text.unfold(0, 65, 16)
model = {"NAME": "GPT", "ARGS": {"block_size": 64, "width": 32, "depth": 1, "heads": 2}}
trainer = Trainer(
    model, (blocks[:, :-1], blocks[:, 1:]), loss="CrossEntropyLoss", optimizer="AdamW", lr=0.01, weight_decay=0.1,
    lr_scheduler="WarmupCosineLR", warmup=10, clip_norm=1.0, accumulation_steps=2, length=150, batch_size=16,
    seed=1, output_dir="output/gpt",
)  # fmt: skip
trainer.train()
found = torch.tensor([list(b"from hook")])
while found.shape[1] < 40:
    found = torch.cat((found, trainer.model(found)[:, -1:].argmax(-1)), dim=1)
print(bytes(found[0].tolist()))
