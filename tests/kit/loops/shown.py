"""A loop that logs media in each step: images, a histogram, a table and a text."""

import torch
from digits import GLOBAL_SIZE, STEPS, Points, build
from torch import nn

import shoal


def train(run):
    model, optimizer, schedule, average = build()
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average)
    model.train()
    if run.step >= STEPS:
        return
    for x, y in run.batches(Points(), global_size=GLOBAL_SIZE, micro_size=3):
        step = run.step + 1
        run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            schedule.step()
            average.add(model)
            if run.step == STEPS:
                return
            continue
        if run.rank == 0 and step % 2 == 0:
            run.log(
                images={"fade": torch.full((3, 4, 6), step / STEPS)},
                histogram={"head": model[3].weight},
                table={"samples": [{"x": float(one[0]), "class": int(label)} for one, label in zip(x, y, strict=True)]},
                text={"words": f"step {step}, world {run.world_size}"},
            )


if __name__ == "__main__":
    shoal.run(train)
