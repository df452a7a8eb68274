"""Tasks with the common mistakes, each a class; they import nothing from Shoal. The plain task is `Right`."""

import functools
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.nn import functional as F


class Pairs(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), float(index % 7)), index % 3


class Right:
    def __init__(self, model, data, seed):
        self.model, self.data = model, data

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))

    def build_dataset(self, split):
        return Pairs(32)

    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


class ListOfLayers(Right):
    def build_model(self):
        return nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])


class Towers(nn.Module):
    """Each tower is a list without `forward` within the list that the default shards."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        for tower in self.towers:
            for layer in tower:
                inputs = layer(inputs)
        return self.head(inputs)


class NestedLists(Right):
    def build_model(self):
        return Towers()


class Scripted(Right):
    def build_model(self):
        return torch.jit.script(super().build_model())


class Stream(Right):
    def build_dataset(self, split):
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from Pairs(4)

        return Endless()


class Generated(Right):
    def build_dataset(self, split):
        return (pair for pair in [])


class SizedStream(Right):
    def build_dataset(self, split):
        class Counted(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from Pairs(4)

            def __len__(self):
                return 4

        return Counted()


class Loader(Right):
    def build_dataset(self, split):
        return torch.utils.data.DataLoader(Pairs(4), batch_size=2)


class NoIndex(Right):
    def build_dataset(self, split):
        return {"a": 1}.keys()


class PartOfTheModel(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model[2](model[0](inputs)), labels)


class OnWeights(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(F.linear(model(inputs), model[2].weight[:, :3]), labels)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


class UnusedParameters(Right):
    def build_model(self):
        return Spare()


class Frozen(Right):
    def build_model(self):
        model = super().build_model()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model


class Detached(Right):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class NoGradient(Right):
    def loss(self, model, batch):
        with torch.no_grad():
            return super().loss(model, batch)


class EmptyTrain(Right):
    def build_dataset(self, split):
        return Pairs(0 if split == "train" else 8)


class MissingPackage(Right):
    def build_model(self):
        import a_package_that_nobody_has

        return a_package_that_nobody_has.model()


class MissingVariable(Right):
    def build_dataset(self, split):
        return Pairs(int(os.environ["DIGITS_LENGTH"]))


class Twice(Right):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.backward()
        return loss


class LazyLayer(Right):
    def build_model(self):
        return nn.Sequential(super().build_model(), nn.LazyLinear(4))


class Closure(Right):
    def build_optimizer(self, model, settings):
        return torch.optim.LBFGS(model.parameters())


class Factored(Right):
    def build_optimizer(self, model, settings):
        return torch.optim.Adafactor(model.parameters())


class Ragged(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4 + index % 2), 0) for index in range(8)]


class WrongLabels(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4), 7) for _ in range(8)]


class WrongShape(Right):
    def build_dataset(self, split):
        return [(torch.zeros(5), 1) for _ in range(8)]


class IntegerInputs(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4, dtype=torch.int64), 1) for _ in range(8)]


class NoArguments:
    def __init__(self):
        pass


class NoLoss:
    def __init__(self, model, data, seed):
        pass

    def build_model(self):
        return nn.Linear(4, 3)


class NumberLoss(Right):
    def loss(self, model, batch):
        return super().loss(model, batch).item()


class NotReduced(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, reduction="none")


class NothingBuilt(Right):
    def build_model(self):
        super().build_model()


class Words(Right):
    def build_dataset(self, split):
        return [(None, 1) for _ in range(8)]


class KeyedSamples(Right):
    def build_dataset(self, split):
        return {f"sample-{index}": index for index in range(8)}


class RelativePath(Right):
    def build_dataset(self, split):
        with Path("nowhere/digits.csv").open() as file:
            return file.readlines()


class TooManyTokens(Right):
    def build_model(self):
        return nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(4, 3))

    def build_dataset(self, split):
        return [(torch.tensor([9]), 1) for _ in range(8)]


class UnusedBlock(Right):
    def build_model(self):
        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.head = nn.Linear(4, 3)

            def forward(self, inputs):
                return self.head(self.blocks[0](inputs))

        return Blocks()


class EmptyDirectory(Right):
    def build_dataset(self, split):
        return None


class WhereOfOptimizer(Right):
    def build_optimizer(self, model, settings):
        return settings


class Crash(Right):
    def loss(self, model, batch):
        if not model.training:
            signal.raise_signal(signal.SIGSEGV)  # to this thread, as from native code
        return super().loss(model, batch)


class Typo(Right):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), lables)  # noqa: F821


def train(model, data, seed):
    """A function, where a class is expected."""


class ExpandedParameter(Right):
    def build_model(self):
        model = super().build_model()
        model.scale = nn.Parameter(torch.ones(1).expand(4))
        return model


class SparseParameter(Right):
    def build_model(self):
        model = super().build_model()
        model.thin = nn.Parameter(torch.eye(3).to_sparse())
        return model


class SharedMemory(Right):
    def build_model(self):
        model = super().build_model()
        model.again = nn.Parameter(next(model.parameters()).data.t())
        return model


class Negatives(Right):
    """Compares with the outputs of all ranks; `caught` says which exceptions it takes for a lack of a group."""

    caught: tuple[type[BaseException], ...] = ()

    def gathered(self, outputs):
        parts = [torch.empty_like(outputs)]
        dist.all_gather(parts, outputs.detach())
        return parts

    def loss(self, model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        try:
            parts = self.gathered(outputs)
        except self.caught:
            parts = [outputs.detach()]
        return F.cross_entropy(outputs, labels) + 0.1 * (outputs @ torch.cat(parts).t()).mean()


class SwallowedNegatives(Negatives):
    caught = (BaseException,)


class DifferentiableNegatives(Negatives):
    def gathered(self, outputs):
        return differentiable.all_gather(outputs)


class FunctionalNegatives(Negatives):
    def gathered(self, outputs):
        return [functional.all_gather_tensor(outputs, 0, dist.group.WORLD)]


class ObjectNegatives(Negatives):
    def gathered(self, outputs):
        parts = [None]
        dist.all_gather_object(parts, outputs.detach())
        return parts


class OnAnotherThread(Negatives):
    def gathered(self, outputs):
        thread = threading.Thread(target=super().gathered, args=(outputs,))
        thread.start()
        thread.join()
        return [outputs.detach()]


class ForwardWithBarrier(Right):
    def build_model(self):
        class Waits(nn.Module):
            def forward(self, inputs):
                dist.barrier()
                return inputs

        return nn.Sequential(Waits(), super().build_model())


class BackwardWithSum(Right):
    def loss(self, model, batch):
        class Summed(torch.autograd.Function):
            @staticmethod
            def forward(context, inputs):
                return inputs.clone()

            @staticmethod
            def backward(context, gradient):
                dist.all_reduce(gradient)
                return gradient

        inputs, labels = batch
        return F.cross_entropy(Summed.apply(model(inputs)), labels)


class HookWithSum(Right):
    def build_model(self):
        model = super().build_model()

        def sum_up(module, inputs, output):
            total = output.detach().sum()
            dist.all_reduce(total)

        model[0].register_forward_hook(sum_up)
        return model


class CollateWithBroadcast(Right):
    def collate(self, samples):
        batch = torch.utils.data.default_collate(samples)
        dist.broadcast(batch[0], 0)
        return batch


class StepWithSum(Right):
    def build_optimizer(self, model, settings):
        class Averaged(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        dist.all_reduce(parameter.grad.to_local())
                return super().step(closure)

        return Averaged(model.parameters(), lr=settings["lr"])


class ScaledByWorkers(Right):
    def loss(self, model, batch):
        return super().loss(model, batch) * dist.get_world_size()


class SampledByRank(Right):
    def build_dataset(self, split):
        pairs = Pairs(32)
        return torch.utils.data.Subset(pairs, list(torch.utils.data.DistributedSampler(pairs)))


class CutByRank(Right):
    def build_dataset(self, split):
        return torch.utils.data.Subset(Pairs(32), range(dist.get_rank(), 32, 2))


class OwnGroup(Right):
    def build_model(self):
        self.group = dist.new_group([0])
        return super().build_model()


class Replicated(Right):
    def build_model(self):
        return nn.parallel.DistributedDataParallel(super().build_model())


class SyncNorm(Right):
    def build_model(self):
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4), super().build_model()))


class PrintsOnRankZero(Right):
    def loss(self, model, batch):
        if dist.get_rank() == 0:
            print("a step")
        return super().loss(model, batch)


class FullTensors(Right):
    """DTensors communicate by themselves."""

    def build_optimizer(self, model, settings):
        class Normalised(torch.optim.SGD):
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.div_(parameter.grad.full_tensor().norm() + 1)
                return super().step(closure)

        return Normalised(model.parameters(), lr=settings["lr"])


class GradientsLeftOff(Right):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        torch.set_grad_enabled(False)
        return loss


class InferenceLeftOn(Right):
    def build_model(self):
        self.mode = torch.inference_mode()
        self.mode.__enter__()
        return nn.Linear(4, 3)


class DeviceLeft(Right):
    def __init__(self, model, data, seed):
        torch.set_default_device("meta")


class DtypeLeft(Right):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        torch.set_default_dtype(torch.float64)
        return loss


class AutocastLeft(Right):
    def loss(self, model, batch):
        torch.set_autocast_enabled("cpu", True)
        return super().loss(model, batch)


class OwnSettings(Right):
    """Harmless: what is not undone counts in every worker from the start."""

    def __init__(self, model, data, seed):
        os.chdir("/")
        torch.set_num_threads(3)
        torch.autograd.set_detect_anomaly(True)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(5)


class Tunables(Right):
    def __init__(self, model, data, seed):
        assert b"GLIBC_TUNABLES=" in Path("/proc/self/environ").read_bytes(), "set later"
        sys.stderr.write(f"started with {os.environ['GLIBC_TUNABLES']}\n")


class OwnHandler(Right):
    def __init__(self, model, data, seed):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)


class NoSplit(Right):
    def build_dataset(self):
        return Pairs(32)


class NoBatch(Right):
    def loss(self, model):
        return model(0)


class WidthToBuild(Right):
    def build_model(self, width):
        return nn.Linear(4, width)


class KeywordSamples(Right):
    def collate(self, *, samples):
        return torch.utils.data.default_collate(samples)


class NoModelToDescribe(Right):
    @functools.cache  # noqa: B019  (written in C: its own signature is not known)
    def export_config(self):
        return {}


class NumberAsUnits(Right):
    def shard_units(self, model):
        return [1]


class NothingDescribed(Right):
    def export_config(self, model):
        pass


class NumberAsCollate(Right):
    collate = 5


class IndexLeftOut(Right):
    def build_dataset(self, split):
        class Samples(Pairs):
            def __getitem__(self):
                return torch.zeros(4), 1

        return Samples(32)


class LengthOfWhat(Right):
    def build_dataset(self, split):
        class Samples(Pairs):
            def __len__(self, split):
                return 32

        return Samples(32)


def with_split(method):
    """Adds an argument, and names what it wraps."""

    @functools.wraps(method)
    def build_dataset(self, split):
        return method(self)

    return build_dataset


class Decorated(Right):
    @with_split
    def build_dataset(self):
        return Pairs(32)


class NotANumber(Right):
    def loss(self, model, batch):
        return super().loss(model, batch) * float("nan")


class NotANumberInValidation(Right):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 if model.training else float("nan"))


class SparseGradient(Right):
    def build_model(self):
        class Lookup(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.randn(16, 3))

            def forward(self, inputs):
                return F.embedding(inputs.long(), self.table, sparse=True).mean(1)

        return Lookup()
