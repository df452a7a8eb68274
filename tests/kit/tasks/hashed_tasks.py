"""A task whose dataset says what it contains, a part for each process that reads it."""

import os

from tiny_tasks import Counting


class Hashed(Counting):
    """`data.contents`: the content hashes, in the order in which processes ask; `data.taken`: an empty directory."""

    def build_dataset(self, split):
        dataset = super().build_dataset(split)
        if split == "train":
            dataset.content_hash = self._next_content()
            dataset.content_parts = lambda: {"numbers.bin": dataset.content_hash}
        return dataset

    def _next_content(self):
        for number, content in enumerate(self.data["contents"]):
            try:
                os.close(os.open(os.path.join(self.data["taken"], str(number)), os.O_CREAT | os.O_EXCL))  # noqa: PTH118
            except FileExistsError:
                continue
            return content
        return self.data["contents"][-1]
