"""A task whose samples have different lengths, as a user writes it; it imports nothing from Shoal."""

import torch
from tiny_tasks import NextToken
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

VOCAB = 29
NO_LABEL = -100


class Texts(torch.utils.data.Dataset):
    """Counting from the index on, over 3 to 40 tokens."""

    def __init__(self, num, tokens_per_micro_batch):
        self.lengths = [3 + 7 * number % 38 for number in range(num)]
        self.tokens_per_micro_batch = tokens_per_micro_batch

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return (torch.arange(self.lengths[index] + 1) * (index % 3 + 1) + index) % VOCAB


class Ragged:
    def __init__(self, model, data, seed):
        self.data = data

    def build_model(self):
        return NextToken(VOCAB, 24, 4, 0.0)

    def build_dataset(self, split):
        return Texts(61 if split == "train" else 17, self.data.get("budget", 80))

    def collate(self, samples):
        tokens = pad_sequence([one[:-1] for one in samples], batch_first=True)
        return tokens, pad_sequence([one[1:] for one in samples], batch_first=True, padding_value=NO_LABEL)

    def loss(self, model, batch):
        tokens, labels = batch
        total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        num = (labels != NO_LABEL).sum()
        return total, num, {"same": total.detach() / num, "padding": (labels == NO_LABEL).sum() / labels.numel()}


class MeanRagged(Ragged):
    """Returns a mean, which is wrong: micro-batches have different numbers of tokens."""

    def loss(self, model, batch):
        total, num, _ = super().loss(model, batch)
        return total / num
