"""Small models of transformers that are no causal language models, with the little data that their tasks read: a spec
for each, and the batch that the model of transformers itself takes.
"""

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

from shoal_workers.contract.text_data import (
    IMAGE_CLASS_TASK,
    MASKED_TASK,
    SEQ2SEQ_TASK,
    SPEECH_TASK,
    TEXT_CLASS_TASK,
)

_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 264,
    "max_position_embeddings": 72,
}
_SPECIAL = {"pad_token_id": 260, "bos_token_id": 261, "eos_token_id": 256, "cls_token_id": 261, "sep_token_id": 256}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 264,
    "pad_token_id": 260,
    "bos_token_id": 261,
    "eos_token_id": 256,
    "decoder_start_token_id": 256,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 264,
    "pad_token_id": 260,
    "eos_token_id": 256,
    "decoder_start_token_id": 260,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_WHISPER = {
    **_BART,
    "decoder_start_token_id": 261,
    "max_source_positions": 50,
    "max_target_positions": 32,
    "num_mel_bins": 16,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": (MASKED_TASK, {"model_type": "bert", **_BERT}, {"seq_len": 32}),
    "roberta": (MASKED_TASK, {"model_type": "roberta", **_BERT}, {"seq_len": 32}),
    "modernbert": (
        MASKED_TASK,
        {"model_type": "modernbert", **_BERT, **_SPECIAL, "local_attention": 8},
        {"seq_len": 32},
    ),
    "t5": (SEQ2SEQ_TASK, {"model_type": "t5", **_T5}, {"seq_len": 16, "target_len": 8}),
    "bart": (SEQ2SEQ_TASK, {"model_type": "bart", **_BART}, {"seq_len": 16, "target_len": 8}),
    "bert, classes": (TEXT_CLASS_TASK, {"model_type": "bert", **_BERT}, {"seq_len": 16, "num_labels": 3}),
    "roberta, classes": (
        TEXT_CLASS_TASK,
        {"model_type": "roberta", **_BERT},
        {"seq_len": 16, "num_labels": 3},
    ),
    "modernbert, classes": (
        TEXT_CLASS_TASK,
        {"model_type": "modernbert", **_BERT, **_SPECIAL},
        {"seq_len": 16, "num_labels": 3},
    ),
    "vit": (IMAGE_CLASS_TASK, {"model_type": "vit", **_VIT}, {"num_labels": 3}),
    "resnet": (
        IMAGE_CLASS_TASK,
        {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 16},
        {"num_labels": 3},
    ),
    "whisper": (SPEECH_TASK, {"model_type": "whisper", **_WHISPER}, {"target_len": 12}),
}
"""By a name that begins with the model type: task, config, and the other keys of `model`."""


def small_spec(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A job that trains it on what `write_data` has put into the folder. `changes`: of the config."""
    task, config, model = MODELS[name]
    cache = {"cache_dir": str(folder / "cache")}
    data: dict[str, dict[str, Any]] = {
        MASKED_TASK: {"paths": [str(folder / "text.txt")], "validation_fraction": 0},
        SEQ2SEQ_TASK: {"paths": [str(folder / "pairs.jsonl")]},
        TEXT_CLASS_TASK: {"paths": [str(folder / "pairs.jsonl")], "text_field": "source"},
        IMAGE_CLASS_TASK: {"folder": str(folder / "images"), "flip": True},
        SPEECH_TASK: {"paths": [str(folder / "speech.jsonl")]},
    }
    return {
        "task": task,
        "model": {"config": {**config, **changes}, **model},
        "data": {**data[task], **cache},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 0.01, "clip_norm": 1.0},
        "schedule": {"warmup_steps": 1},
        "stop": {"steps": 3},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "seed": 3,
    }


def write_data(folder: Path) -> None:
    """Text, pairs with labels, images of three classes as arrays, and audio with transcripts: always the same."""
    lines = [f"{a} and {b} make {a + b}, {a} times {b} make {a * b}." for a in range(40) for b in range(20)]
    (folder / "text.txt").write_text("\n".join(lines))
    pairs = [
        {"source": f"{a} x {b}", "target": str(a * b), "label": a * b % 3} for a in range(2, 12) for b in range(3, 13)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    numbers = np.random.default_rng(1)
    for label in range(3):
        directory = folder / "images" / f"class {label}"
        directory.mkdir(parents=True)
        for number in range(12):
            image = numbers.integers(0, 120, (16, 16, 3), np.uint8)
            image[:, :, label] += 100
            np.save(directory / f"{number}.npy", image)
    rows = []
    for number in range(16):
        write_wave(folder / f"{number}.wav", np.sin(np.arange(6000 + 500 * number) / (4 + number)) * 0.5)
        rows.append({"audio": f"{number}.wav", "text": f"tone {number}"})
    (folder / "speech.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_wave(file: Path, samples: Any, rate: int = 16_000, width: int = 2, channels: int = 1) -> None:
    """Samples between -1 and 1, of all channels in turn, as PCM."""
    whole = np.round(np.asarray(samples) * ((1 << (8 * width - 1)) - 1)).astype("<i4")
    with wave.open(str(file), "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        encoded = (whole + 128).astype(np.uint8)[:, None] if width == 1 else whole[:, None].view(np.uint8)[:, :width]
        out.writeframes(encoded.tobytes())


def their_inputs(task: str, batch: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch of a task, as the arguments of transformers' own model, which computes its loss itself."""
    names = {"tokens": "input_ids", "is_token": "attention_mask", "label": "labels"}
    names |= {"pixels": "pixel_values", "features": "input_features"}
    return {names.get(name, name): value for name, value in batch.items()}
