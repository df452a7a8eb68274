"""PPO: each step plays episodes with the policy as it is, then makes several updates on what was played.

    shoal submit train.py --workers 1:4 --follow -- 300          also: python train.py, torchrun ... train.py

What the ranks get is beginnings of episodes. What they have played stays with the rank for the passes of
the step: the micro-batches of a pass come in the same order each time.
"""

import sys

import torch
from torch import nn
from torch.distributions import Categorical

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
LENGTH, PASSES, CLIP = 16, 3, 0.2


class Beginnings:
    """Where the cart is at first, and how fast."""

    def __init__(self):
        self.states = torch.randn(4096, 2, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return len(self.states)

    def __getitem__(self, index):
        return self.states[index]


def moved(state, action):
    """The environment: a cart on a line is pushed left or right; the reward is for being near the middle."""
    place, speed = state.unbind(-1)
    speed = speed + 0.2 * (2 * action - 1)
    place = place + 0.2 * speed
    return torch.stack([place, speed], dim=-1), -place.abs()


def play(policy, state):
    """One episode of each beginning: states, actions, their log-probabilities, and the rewards that follow."""
    states, actions, said, rewards = [], [], [], []
    for _ in range(LENGTH):
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        states, actions, said = [*states, state], [*actions, action], [*said, choice.log_prob(action)]
        state, reward = moved(state, action)
        rewards.append(reward)
    following = torch.stack(rewards).flip(0).cumsum(0).flip(0) / LENGTH
    return torch.stack(states), torch.stack(actions), torch.stack(said), following


def train(run):
    torch.manual_seed(4)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).to(run.device)
    critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(run.device)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=3e-3)
    run.track(policy=policy, critic=critic, optimizer=optimizer)
    for step in run.global_batches(Beginnings(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        with torch.no_grad():
            played = [play(policy, beginnings) for beginnings in step]
        for _ in range(PASSES):
            for _, (states, actions, said, following) in zip(step, played, strict=True):
                value = critic(states).squeeze(-1)
                advantage = (following - value).detach()
                ratio = (Categorical(logits=policy(states)).log_prob(actions) - said).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                run.backward((value - following).square().mean() - gain.mean(), weight=states.shape[1])
            run.update(optimizer, clip=1.0)
        run.commit(reward=played[0][3][0].mean())


if __name__ == "__main__":
    shoal.run(train)
