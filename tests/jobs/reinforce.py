"""Learn to walk to the right (REINFORCE): the data are episodes of the policy."""

import torch
from given import corridors
from torch import nn

from hookline import Trainer
from hookline.hooks import get_event_storage


class Policy(nn.Linear):
    def forward(self, env):
        log_probs, seen, over = [], env.reset(), False
        while not over:
            chosen = torch.distributions.Categorical(logits=super().forward(seen))
            log_probs.append(chosen.log_prob(action := chosen.sample()))
            seen, reward, over = env.step(action)
        get_event_storage().put_scalar("reward", reward)
        return {"loss": -(reward - 0.5) * torch.stack(log_probs).sum()}


trainer = Trainer(Policy(7, 2), corridors(), lr=0.1, length=200, seed=1, output_dir="output/reinforce")
trainer.train()
