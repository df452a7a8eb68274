"""The built-in language model with metrics of its own, which can be split along every axis."""

from shoal_workers.tasks.lm import LanguageModel


class MeteredText(LanguageModel):
    """The loss itself; the mean of the labels, which differs between the ranks of a sequence; a number."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss, {"same": loss, "label": batch["labels"].float().mean(), "two": 2}
