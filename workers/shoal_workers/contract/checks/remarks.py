"""What is probably not meant in a spec that is valid. A remark never refuses it. Pure, except that it looks
for the tokenizer in a Hugging Face model's directory.

Said by `shoal validate`, and by the note of a job that was submitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shoal_workers.contract.model.hf import TOKENIZER_NAME, hugging_face_of, lacks_tokenizer, slow_tokenizer_of
from shoal_workers.contract.spec import JobSpec, WorkerSpec


def remarks(spec: JobSpec) -> Iterator[str]:
    """Sentences about the spec alone."""
    warmup, steps = spec.schedule.warmup_steps, spec.stop.steps
    if steps is not None and warmup > steps:
        yield (
            f"schedule.warmup_steps {warmup} is more than stop.steps {steps}: the learning rate does not reach "
            "optimizer.lr, and does not decay."
        )
    if spec.checkpoint.every_steps is None and spec.checkpoint.every_s is None:
        yield (
            "checkpoint.every_steps and checkpoint.every_s are both null: the only durable checkpoints are those of a "
            "pause and of the end. If the whole cluster is lost, the job starts from step 0."
        )
    hugging_face = hugging_face_of(spec.task, spec.model)
    if hugging_face is not None and "tokenizer" not in spec.data and lacks_tokenizer(hugging_face):
        slow = slow_tokenizer_of(hugging_face)
        also = f" ({' and '.join(slow)} there cannot be read, and are not exported)" if slow else ""
        convert = (
            f"from transformers import AutoTokenizer as A; p = {hugging_face.path!r}; "
            "A.from_pretrained(p).save_pretrained(p)"
        )
        yield (
            f"model.path {hugging_face.path!r} has no {TOKENIZER_NAME}{also}, so the text is read as bytes, which the "
            "model was not trained on: name its tokenizer in data.tokenizer, or make one there: "
            f'python -c "{convert}".'
        )


def capacity_remark(spec: JobSpec, nodes: Iterable[tuple[float, float]]) -> str:
    """Whether the nodes, each with its CPUs and GPUs, have room for `elasticity.max_workers`; empty: they have."""
    worker, most = spec.worker, spec.elasticity.max_workers
    if not worker.cpus and not worker.gpus:
        return ""  # such workers have room everywhere
    room = sum(_room(worker, cpus, gpus) for cpus, gpus in nodes)
    if room >= most:
        return ""
    needs = " and ".join(
        f"{number:g} {unit}{'' if number == 1 else 's'}"
        for number, unit in ((worker.cpus, "CPU"), (worker.gpus, "GPU"))
        if number
    )
    return (
        f"elasticity.max_workers is {most}, and the cluster has room for {room} worker{'' if room == 1 else 's'} "
        f"with {needs} each: the job "
        "gets more of them when nodes join."
    )


def _room(worker: WorkerSpec, cpus: float, gpus: float) -> int:
    return min(int(has // needs) for has, needs in ((cpus, worker.cpus), (gpus, worker.gpus)) if needs)
