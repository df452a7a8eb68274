"""One worker and two have the losses of a plain loop with transformers, on every layout of a tokenizer and in every
spelling of a line: the tokens that count are transformers' own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.text_data import SEQ2SEQ_TASK, TEXT_CLASS_TASK

transformers = pytest.importorskip("transformers")

from kit.worlds.their_tokens import (  # noqa: E402
    CONVERSATIONS,
    PAIRS,
    TEMPLATES,
    expected_conversation,
    expected_pair,
)
from kit.worlds.tokenizer_layouts import LAYOUTS, write_layout  # noqa: E402

_STEPS = 3
_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_COMMON = {"vocab_size": 700, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_MODELS = {
    "causal": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **_COMMON)),
    "classes": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**_SIZES, **_COMMON, **_NO_DROPOUT)
    ),
    "seq2seq": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**_T5, **_COMMON, decoder_start_token_id=3)
    ),
}
_Cells = list[tuple[int, bool]]
_TASKS = {
    "answers": (SFT_TASK, "causal", {"seq_len": 256}),
    "preferences": (DPO_TASK, "causal", {"seq_len": 256}),
    "text": (HF_TASK, "causal", {"seq_len": 16}),
    "classes": (TEXT_CLASS_TASK, "classes", {"seq_len": 12}),
    "targets": (SEQ2SEQ_TASK, "seq2seq", {"seq_len": 12, "target_len": 8}),
}
_TEMPLATES = ("plain", "marked, trimmed", "parts", "spaced", "marked", "a comment with a mark", "marked, tight")


def _sum(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def _of_answer(network: Any, cells: _Cells) -> Any:
    """The sum of the losses of the tokens of an answer, alone and without padding."""
    tokens = torch.tensor([token for token, _ in cells])
    labels = torch.tensor([token if is_answer else -100 for token, is_answer in cells])
    return _sum(network(tokens[None, :-1]).logits, labels[1:])


def _lines(layout: str, template: str, tokenizer: Any, task: str) -> tuple[list[Any], list[Any]]:
    """Lines of a file, and what transformers makes of each."""
    texts = [("The sky is blue.\n", 0), ("def f(x):\n    return x\n", 1), ("naïve ☃ is 4  yes", 1), ("no, it is 🙂", 0)]
    if task == "text":
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        bodies = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in texts * 4]
        flat = [token for body in bodies for token in [*body, end]]
        return [{"text": text} for text, _ in texts * 4], [flat[at : at + 17] for at in range(0, len(flat) - 16, 16)]
    if task in ("classes", "targets"):
        lines = [{"text": text, "source": text, "label": label, "target": "yes " + text} for text, label in texts]
        cut = [tokenizer(text, truncation=True, max_length=12)["input_ids"] for text, _ in texts]
        short = [tokenizer("yes " + text, truncation=True, max_length=8)["input_ids"] for text, _ in texts]
        wanted = [label for _, label in texts] if task == "classes" else short
        return lines, list(zip(cut, wanted, strict=True))
    pairs = [({"prompt": prompt, "completion": answer}, None) for prompt, answer in PAIRS.values()]
    chats = [(record, template) for record in CONVERSATIONS.values()]
    if task == "answers":
        lines = [*(line for line, _ in pairs), *(record for record, _ in chats)]
        cells = [expected_pair(tokenizer, *line.values()) for line, _ in pairs]
        cells += [expected_conversation(tokenizer, record, template) for record, _ in chats]
        return lines, [cell for cell in cells if any(is_answer for _, is_answer in cell[1:])]
    lines, both = [], []
    for prompt, answer in PAIRS.values():
        lines.append({"prompt": prompt, "chosen": answer, "rejected": "no"})
        both.append(tuple(expected_pair(tokenizer, prompt, text) for text in (answer, "no")))
    for name in ("two turns", "with a system prompt", "begins with the assistant", "prompt and completion"):
        record = CONVERSATIONS[name]
        messages = record.get("messages") or record["prompt"] + record["completion"]
        answers = (messages[-1:], [{"role": "assistant", "content": "no"}])
        lines.append(dict(zip(("prompt", "chosen", "rejected"), (messages[:-1], *answers), strict=True)))
        given = [{"prompt": messages[:-1], "completion": answer} for answer in answers]
        both.append(tuple(expected_conversation(tokenizer, one, template) for one in given))
    return lines, [pair for pair in both if pair[0] != pair[1]]


def _loss(network: Any, reference: Any, task: str, samples: list[Any]) -> Any:
    if task == "answers":
        count = sum(is_answer for cells in samples for _, is_answer in cells[1:])
        return torch.stack([_of_answer(network, cells) for cells in samples]).sum() / count
    if task == "preferences":
        margins = []
        for pair in samples:
            trained = [_of_answer(network, cells) for cells in pair]
            with torch.no_grad():
                theirs = [_of_answer(reference, cells) for cells in pair]
            margins.append(trained[1] - trained[0] - theirs[1] + theirs[0])
        return -F.logsigmoid(0.1 * torch.stack(margins)).mean()
    if task == "text":
        return network(torch.tensor(samples), labels=torch.tensor(samples)).loss
    if task == "classes":
        losses = [network(torch.tensor([text]), labels=torch.tensor([label])).loss for text, label in samples]
        return torch.stack(losses).mean()
    sums = [_sum(network(torch.tensor([s]), labels=torch.tensor([t])).logits, torch.tensor(t)) for s, t in samples]
    return torch.stack(sums).sum() / sum(len(target) for _, target in samples)


def _plain(directory: Path, task: str, samples: list[Any]) -> dict[int, float]:
    """The losses of a loop of a few lines."""
    auto = {"classes": "SequenceClassification", "targets": "Seq2SeqLM"}.get(task, "CausalLM")
    network = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(directory)
    reference, losses = copy.deepcopy(network), {}
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.003, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, _STEPS + 1):
        loss = _loss(network, reference, task, samples)
        losses[step] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.cells(1, len(LAYOUTS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_losses_are_those_of_a_plain_loop_with_transformers(
    make_job: Callable[..., Any], tmp_path: Path, layout: str
) -> None:
    torch.set_num_threads(1)
    number = LAYOUTS.index(layout)
    template, others = _TEMPLATES[number], [name for name in _TASKS if name != "answers"]
    wrong = []
    for task in ("answers", others[number % len(others)]):
        name, kind, model = _TASKS[task]
        directory = write_layout(tmp_path / task, layout, TEMPLATES[template])
        torch.manual_seed(0)
        _MODELS[kind]().save_pretrained(directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        lines, samples = _lines(layout, template, tokenizer, task)
        file = tmp_path / f"{task}.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        data = {"paths": [str(file)], "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0}
        spec: dict[str, Any] = {
            "task": name,
            "model": {"path": str(directory), **model},
            "data": data,
            "batch": {"global_size": len(samples), "micro_size": 1},
            "optimizer": {"lr": 0.003, "weight_decay": 0, "clip_norm": None},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "stop": {"steps": _STEPS},
            "checkpoint": {"every_steps": None},
            "snapshot": {"enabled": False},
            "validation": {"samples": 0},
        }
        expected = _plain(directory, task, samples)
        for size in (1, 2):
            job = make_job(f"{task}-{size}", **spec)
            workers = job.workers(size)
            ends = job.run(workers)
            found = job.losses(workers)
            if {end.kind for end in ends} != {ExitKind.FINISHED} or found != pytest.approx(expected, abs=1e-5):
                wrong.append((task, size, found, expected, [end.error for end in ends]))
    assert wrong == []
