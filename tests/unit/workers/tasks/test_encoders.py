"""Tasks for encoders of transformers compute the losses of transformers, and what they export is the model."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.worlds.encoder_worlds import MODELS, small_spec, their_inputs, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_api.cli.commands.specs import describe_data
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.families import DROPOUTS_OF_ENCODERS
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.text_data import IMAGE_CLASS_TASK, SECTIONS, SPEECH_TASK
from shoal_workers.data.errors import BadRowError, EmptyCorpusError, MissingTextError
from shoal_workers.data_show import show
from shoal_workers.engine.sample_order import training_order
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.tasks.shown import SHOWN

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*token_id.*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data")
    write_data(found)
    return found


def _loaded(spec: dict[str, Any]) -> tuple[JobSpec, LoadedTask, Any]:
    parsed = parse_spec(spec)
    task = load_task(parsed)
    task.prepare(lambda _: None)
    task.open_data()
    return parsed, task, task._task


def _batch(parsed: JobSpec, task: LoadedTask, positions: range = range(4)) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = task.collate(
        [task.train_data[index] for index in training_order(task.train_data, positions, seed=parsed.seed)]
    )
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers(folder: Path, name: str) -> None:
    parsed, task, own = _loaded(small_spec(name, folder))
    model: Any = task.build_model().eval()
    batch = _batch(parsed, task)
    with torch.no_grad():
        returned = task.evaluate(model, batch)
        theirs = model.network(**their_inputs(parsed.task, batch)).loss
    loss = returned.loss if returned.weight is None else returned.loss / returned.weight
    assert float(loss) == pytest.approx(float(theirs), abs=1e-5)
    assert type(model.network) in _known(own.auto_class)


def _known(auto_class: str) -> set[Any]:
    """All classes that an Auto class of transformers makes."""
    return {kind for kinds in getattr(transformers, auto_class)._model_mapping.values() for kind in _each(kinds)}


def _each(kinds: Any) -> tuple[Any, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_is_the_model(folder: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    parsed, task, own = _loaded(small_spec(name, folder))
    model: Any = task.build_model().eval()
    described = task.export
    (tmp_path / "config.json").write_text(json.dumps({**described["config"], "dtype": "float32"}))
    first = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    tensors = {}
    for given in first.values():
        [[pattern, replacement]] = described["renames"]
        tensors[re.sub(pattern, replacement, given)] = model.state_dict()[given].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    auto = getattr(transformers, own.auto_class)
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    inputs = their_inputs(parsed.task, _batch(parsed, task))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, model.network(**inputs).logits)
    again = small_spec(name, folder)
    del again["model"]["config"]
    model_section = {**again["model"], "path": str(tmp_path)}
    _, from_files, own = _loaded({**again, "model": model_section})
    from_files.build_model()
    assert own.initial_weights == str(tmp_path), "each worker reads its part"


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "cp"])
def test_other_axes_are_refused_with_the_architecture_and_the_axes_that_there_are(folder: Path, axis: str) -> None:
    for name in ("bert", "t5", "vit", "whisper", "bert, classes"):
        spec = {**small_spec(name, folder), "parallelism": {axis: 2, **({"dp_shard": 2} if axis == "ep" else {})}}
        with pytest.raises(
            SpecError, match=f"{axis} is 2, but the architecture '{name.split(',')[0]}' has no plan"
        ) as e:
            parse_spec(spec)
        assert "Its axes are dp_replicate, dp_shard. Set" in str(e.value)


def test_unknown_keys_of_a_section_are_refused_by_name(folder: Path) -> None:
    for name in ("bert", "t5", "vit", "whisper", "bert, classes"):
        spec = small_spec(name, folder)
        spec["model"]["lora"] = {"r": 4}
        spec["data"]["mask_fracton"] = 0.3
        with pytest.raises(SpecError) as refused:
            parse_spec(spec)
        assert "unknown key 'lora'" in str(refused.value) and "unknown key 'mask_fracton'" in str(refused.value)


def test_defaults_of_dropout_are_those_of_the_installed_transformers() -> None:
    for model_type, known in DROPOUTS_OF_ENCODERS.items():
        written = transformers.AutoConfig.for_model(model_type).to_dict()
        theirs = {key: value for key, value in written.items() if "drop" in key and isinstance(value, float) and value}
        assert theirs == known, model_type
    types = {config["model_type"] for _, config, _ in MODELS.values()}
    for model_type in types - set(DROPOUTS_OF_ENCODERS):
        written = transformers.AutoConfig.for_model(model_type).to_dict()
        assert not any(value for key, value in written.items() if "drop" in key and isinstance(value, float))


def test_a_new_number_of_classes_makes_a_new_head_of_a_pretrained_model(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**MODELS["bert"][1])
    torch.manual_seed(1)
    stored = transformers.AutoModelForMaskedLM.from_config(config)
    stored.save_pretrained(tmp_path)
    spec = small_spec("bert, classes", folder)
    spec["model"] = {"path": str(tmp_path), "seq_len": 16}
    spec["data"]["classes"] = ["none", "one", "two"]
    states = []
    for _ in range(2):
        _, task, own = _loaded(spec)
        states.append(task.build_model().state_dict())
        assert own.initial_weights is None
        assert task.export["config"]["id2label"] == {"0": "none", "1": "one", "2": "two"}
    embedding = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(states[0][f"network.{embedding}"], stored.state_dict()[embedding])
    assert states[0]["network.classifier.weight"].shape == (3, 32)
    assert torch.equal(states[0]["network.classifier.weight"], states[1]["network.classifier.weight"]), "from the seed"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"source": "a", "label": 3}, r"line 1: data\.label_field is 3, and the model has 3 classes: .* from 0 to 2\."),
        ({"source": "a", "label": "none"}, r"data\.label_field is 'none', and the model has 3 classes"),
        ({"source": "a"}, r"line 1: field 'label' is missing: at 'label' there is source\."),
        ({"source": 5, "label": 1}, r"data\.text_field is int, not text"),
    ],
)
def test_a_bad_row_is_named_or_left_out(folder: Path, tmp_path: Path, row: dict[str, Any], words: str) -> None:
    file = tmp_path / "rows.jsonl"
    good = [{"source": "b", "label": number % 3} for number in range(6)]
    file.write_text("\n".join(map(json.dumps, [row, *good])))
    spec = small_spec("bert, classes", folder)
    spec["data"] = {**spec["data"], "paths": [str(file)], "validation_fraction": 0, "cache_dir": str(tmp_path)}
    with pytest.raises(BadRowError, match=words) as refused:
        _loaded(spec)
    assert str(file) in str(refused.value) and 'data.bad_rows: "skip"' in str(refused.value)
    spec["data"]["bad_rows"] = "skip"
    _, task, _ = _loaded(spec)
    assert len(task.train_data) == 6


def test_pairs_are_read_from_parquet_arrow_and_csv_as_from_json_lines(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    nested = pyarrow.table({"translation": [{"source": row["source"], "target": row["target"]} for row in rows]})
    parquet.write_table(nested, tmp_path / "pairs.parquet", row_group_size=7)
    flat = pyarrow.table({name: [row[name] for row in rows] for name in ("source", "target")})
    feather.write_feather(flat, str(tmp_path / "pairs.arrow"))
    (tmp_path / "pairs.csv").write_text("target,source\n" + "\n".join(f"{r['target']},{r['source']}" for r in rows))
    hashes = set()
    for file, prefix in (("jsonl", ""), ("parquet", "translation."), ("arrow", ""), ("csv", "")):
        spec = small_spec("t5", folder)
        path = str((folder if file == "jsonl" else tmp_path) / f"pairs.{file}")
        fields = {f"{name}_field": f"{prefix}{name}" for name in ("source", "target")}
        spec["data"] = {**spec["data"], **fields, "paths": [path], "cache_dir": str(tmp_path / "cache")}
        _, task, _ = _loaded(spec)
        hashes.add(task.content_hash)
    assert len(hashes) == 1, "the same examples, in the same splits"


def _labels(folder: Path, file: Path, classes: list[str]) -> list[int] | str:
    """Labels of the rows, in order, or why they are refused."""
    spec = small_spec("bert, classes", folder)
    data = {"paths": [str(file)], "classes": classes, "validation_fraction": 0, "cache_dir": str(file.parent / "cache")}
    spec["data"] |= data
    spec["model"]["num_labels"] = None if classes else 3
    try:
        _, task, _ = _loaded(spec)
    except BadRowError as error:
        return str(error).partition("label_field is ")[2].partition(", and")[0].strip("'")
    return [int(task.train_data[number]["label"]) for number in range(len(task.train_data))]


def test_the_same_rows_have_the_same_labels_in_every_format(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cases: dict[str, tuple[list[Any], list[str], list[int] | str]] = {
        "numbers": ([0, 2, 1], [], [0, 2, 1]),
        "names": (["bad", "good"], ["bad", "good"], [0, 1]),
        "numbers of names": ([1, 0], ["bad", "good"], [1, 0]),
        "digits as names": ([1, 3, 2], ["1", "2", "3"], [0, 2, 1]),
        "digits as names, reversed": ([0, 1], ["1", "0"], [1, 0]),
        "digits as names, counted from 0": ([0, 1], ["1", "2"], "0"),
        "too large": ([0, 3], [], "3"),
        "negative": ([-1], [], "-1"),
        "a fraction": ([1.5], [], "1.5"),
    }
    wrong = {}
    for number, (case, (labels, classes, expected)) in enumerate(cases.items()):
        rows = [{"source": f"text {at}", "label": label} for at, label in enumerate(labels)]
        place = tmp_path / str(number)
        place.mkdir()
        (place / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (place / "a.csv").write_text("source,label\n" + "\n".join(f"{row['source']},{row['label']}" for row in rows))
        parquet.write_table(pyarrow.Table.from_pylist(rows), place / "a.parquet")
        found = {name: _labels(folder, place / name, classes) for name in ("a.jsonl", "a.csv", "a.parquet")}
        if any(one != expected for one in found.values()):
            wrong[case] = found
    assert wrong == {}


def _noisy_image(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (40, 40, 3), np.uint8)


def _jpeg(seed: int) -> bytes:
    out = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(_noisy_image(seed)).save(out, "jpeg")
    return out.getvalue()


@pytest.mark.parametrize("kind", ["folder", "rows"])
def test_a_damaged_image_is_refused_by_its_place_or_left_out_and_counted(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images = [_jpeg(number) for number in range(12)]
    images[5] = images[5][: len(images[5]) // 2]
    data: dict[str, Any] = {"validation_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    if kind == "folder":
        for number, content in enumerate(images):
            file = tmp_path / "images" / f"class {number % 3}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        data["folder"] = str(tmp_path / "images")
    else:
        rows = [{"image": {"bytes": content}, "label": number % 3} for number, content in enumerate(images)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "images.parquet")
        data["paths"] = [str(tmp_path / "images.parquet")]
    place = "class 2/5.jpg is" if kind == "folder" else "images.parquet, row 6 is"
    spec = {**small_spec("vit", folder), "data": data}
    with pytest.raises(BadRowError, match=f"{place} no image that can be read: .*truncated"):
        _, task, _ = _loaded(spec)
        [task.train_data[number] for number in range(12)]
    data["bad_rows"] = "skip"
    parsed = parse_spec(spec)
    task, said = load_task(parsed), list[str]()
    task.prepare(said.append)
    task.open_data()
    assert len([task.train_data[number] for number in range(len(task.train_data))]) == 11
    assert re.search(rf"1 examples are left out, the first because .*{place}", said[-1])
    said.clear()
    task.prepare(said.append)
    assert len(said) == (kind == "folder") * 3 + 1, "it is said again by who finds it done"


def test_a_field_of_csv_may_be_large_and_a_row_with_another_number_of_columns_is_named(
    folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"label,source\n1,short\n2,{'long ' * 60_000}\n0,one,two\n1,last\n")
    spec = small_spec("bert, classes", folder)
    spec["data"] = {"paths": [str(file)], "text_field": "source", "validation_fraction": 0, "cache_dir": str(tmp_path)}
    with pytest.raises(BadRowError, match=r"a\.csv, row 3: \(line 4\) has 3 columns, not 2"):
        _loaded(spec)
    spec["data"]["bad_rows"] = "skip"
    _, task, own = _loaded(spec)
    assert [int(task.train_data[number]["label"]) for number in range(len(task.train_data))] == [1, 2, 1]
    assert own._examples.num_left_out == 1
    file.write_text("label,source\n7,a\n8,b\n")
    with pytest.raises(
        EmptyCorpusError, match=r"a\.csv\) has no example. all 2 of its rows .* because .*row 1: .* is '7'"
    ):
        _loaded(spec)


def test_a_class_that_only_the_validation_folder_has_is_refused(folder: Path, tmp_path: Path) -> None:
    for place in ("train/cat", "train/dog", "validation/cat", "validation/emu"):
        (tmp_path / place).mkdir(parents=True)
        np.save(tmp_path / place / "0.npy", np.zeros((16, 16, 3), np.uint8))
    spec = small_spec("vit", folder)
    spec["model"]["num_labels"] = 2
    data = {"folder": str(tmp_path / "train"), "validation_folder": str(tmp_path / "validation")}
    spec["data"] = {**data, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(
        MissingTextError, match=r"validation' has directories that are no classes of data\.folder: emu\."
    ):
        _loaded(spec)
    spec["data"]["classes"] = ["cat", "dog"]
    assert len(_loaded(spec)[1].train_data) == 2


def test_text_that_is_not_utf8_is_refused_with_its_row(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = pyarrow.table({"source": [b"good", "caf\xe9".encode("latin-1")], "label": [0, 1]})
    parquet.write_table(rows, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(b'{"source": "good", "label": 0}\n{"source": "caf\xe9", "label": 1}\n')
    for name, place in (("a.parquet", "row 2"), ("a.jsonl", "line 2")):
        spec = small_spec("bert, classes", folder)
        spec["data"] |= {
            "paths": [str(tmp_path / name)],
            "cache_dir": str(tmp_path / "cache"),
            "validation_fraction": 0,
        }
        with pytest.raises(BadRowError, match=rf"{name}, {place}: .*is not UTF-8: .*Convert the file"):
            _loaded(spec)


def test_a_target_ends_with_the_end_of_a_text_and_is_cut_before_it(folder: Path) -> None:
    spec = small_spec("t5", folder)
    spec["model"] |= {"seq_len": 4, "target_len": 2}
    _, task, own = _loaded(spec)
    sample = task.train_data[0]
    assert sample["tokens"].tolist()[-1] == 256 and sample["labels"].tolist()[-1] == 256
    assert own._decoder is None
    task.build_model()
    before = own._decoder.before(torch.tensor([[5, 256, -100]]))
    assert before.tolist() == [[260, 5, 256]], "the start, and padding where there is no label"


def test_images_of_a_folder_are_those_of_rows_and_every_second_one_is_flipped(folder: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    files = sorted((folder / "images").rglob("*.npy"), key=lambda one: one.relative_to(folder).as_posix())
    table = {
        "image": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [file.parent.name for file in files],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "images.parquet")
    spec = small_spec("vit", folder)
    spec["data"] |= {"validation_fraction": 0}
    parsed, task, _ = _loaded(spec)
    spec["data"] = {
        "paths": [str(tmp_path / "images.parquet")],
        "classes": ["class 0", "class 1", "class 2"],
        "validation_fraction": 0,
        "cache_dir": str(tmp_path / "cache"),
    }
    _, rows, _ = _loaded(spec)
    assert len(rows.train_data) == len(task.train_data) == 36
    positions = range(5 * 36)
    chosen = training_order(task.train_data, positions, seed=parsed.seed)
    assert sorted(one % 36 for one in chosen) == sorted([*range(36)] * 5), "each image once in an epoch"
    num_flipped = 0
    for index in chosen:
        ours, theirs = task.train_data[index], rows.train_data[index % 36]
        assert ours["label"] == theirs["label"]
        is_flipped = not torch.equal(ours["pixels"], theirs["pixels"])
        assert torch.equal(ours["pixels"].flip(-1) if is_flipped else ours["pixels"], theirs["pixels"])
        num_flipped += is_flipped
    assert 70 <= num_flipped <= 110
    assert chosen == training_order(task.train_data, positions, seed=parsed.seed)
    assert task.export["config"] == {"task": IMAGE_CLASS_TASK, "model": parsed.model}, "no model yet"
    task.build_model()
    assert task.export["config"]["id2label"] == {"0": "class 0", "1": "class 1", "2": "class 2"}


def test_an_image_of_the_folder_that_has_changed_is_named(folder: Path, tmp_path: Path) -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        np.save(tmp_path / "images" / name / "0.npy", image)
    spec = small_spec("vit", folder)
    del spec["model"]["num_labels"]
    spec["data"] = {"folder": str(tmp_path / "images"), "validation_fraction": 0, "cache_dir": str(tmp_path)}
    _, task, _ = _loaded(spec)
    assert len(task.train_data) == 2
    np.save(tmp_path / "images" / "a" / "0.npy", image[:8])
    with pytest.raises(MissingTextError, match=r"a/0\.npy has changed: it had 896 bytes, and has 512"):
        task.train_data[0]
    spec["model"]["num_labels"] = 3
    with pytest.raises(ValueError, match=r"data\.classes has 2 names, and model\.num_labels is 3"):
        _loaded(spec)


def test_each_task_has_its_sections_in_the_schema() -> None:
    from shoal_workers.contract.checks.spec_errors import job_spec_schema

    schema = job_spec_schema()
    rules = {
        rule["if"]["properties"]["task"].get("const"): rule for rule in schema["allOf"] if "task" in str(rule["if"])
    }
    for task, (model, data) in SECTIONS.items():
        keys = rules[task]["then"]["properties"]
        assert [keys[name]["$ref"].rpartition("/")[2] for name in ("model", "data")] == [model.__name__, data.__name__]


def test_a_model_of_another_kind_is_refused_by_transformers_with_its_architecture(folder: Path) -> None:
    spec = small_spec("bert", folder)
    spec["model"]["config"] = MODELS["vit"][1] | {"vocab_size": 300}
    _, task, _ = _loaded(spec)
    with pytest.raises(ValueError, match=r"AutoModelForMaskedLM.*ViTConfig|ViTConfig.*AutoModelForMaskedLM"):
        task.build_model()


def test_a_transcript_has_the_tokenizers_prompt_but_for_what_the_decoder_reads_first(
    folder: Path, tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<|start|>", "<|en|>", "<|end|>", "tone", *map(str, range(16))]
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.add_special_tokens(words[:3])
    prompt = [(word, at) for at, word in enumerate(words[:3])]
    own.post_processor = tokenizers.processors.TemplateProcessing("<|start|> <|en|> $A <|end|>", special_tokens=prompt)
    own.save(str(tmp_path / "tokenizer.json"))
    spec = small_spec("whisper", folder, decoder_start_token_id=0)
    spec["data"] |= {
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "cache_dir": str(tmp_path),
        "validation_fraction": 0,
    }
    _, task, own_task = _loaded(spec)
    labels = task.train_data[7]["labels"].tolist()
    assert labels == [1, 3, words.index("7"), 2, *[-100] * 8]
    task.build_model()
    assert own_task._decoder.before(torch.tensor([labels[:5]])).tolist() == [[0, 1, 3, words.index("7"), 2]]
    assert task.export["files"] == {"tokenizer.json": str((tmp_path / "tokenizer.json").resolve())}
    no_end = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}))
    no_end.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text('{"audio": [0.5, 0.5], "text": ""}')
    spec["data"]["paths"] = [str(tmp_path / "rows.jsonl")]
    with pytest.raises(BadRowError, match=r"line 1: data\.text_field is an empty text"):
        _loaded(spec)


def test_a_decoder_that_classifies_needs_a_token_for_padding(folder: Path) -> None:
    document = small_spec("bert, classes", folder)
    llama = {**small_config("llama"), "vocab_size": 264}
    document["model"] = {"config": {**llama, "pad_token_id": None}, "seq_len": 16, "num_labels": 3}
    with pytest.raises(ValueError, match=r"has no pad_token_id, and Llama.* Set pad_token_id in model\.config, or in"):
        load_task(parse_spec(document)).build_model()
    document["model"]["config"]["pad_token_id"] = 260
    parsed, task, _ = _loaded(document)
    assert task.evaluate(task.build_model(), _batch(parsed, task)).loss.isfinite()


def test_a_trained_head_of_an_encoder_is_read_whatever_its_config_says_of_it(folder: Path, tmp_path: Path) -> None:
    _, config, _ = MODELS["bert"]
    untied = transformers.AutoConfig.for_model(**{**config, "tie_word_embeddings": False})
    network = transformers.AutoModelForMaskedLM.from_config(untied)
    network.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    document = small_spec("bert", folder)
    document["model"] = {"path": str(tmp_path), "seq_len": 32}
    model: Any = load_task(parse_spec(document)).build_model()
    torch.testing.assert_close(model.network.get_output_embeddings().weight, network.get_output_embeddings().weight)


def test_images_and_labels_are_shown_as_they_arrive(folder: Path, tmp_path: Path) -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8, :8] = 255
    for name, num in (("cat", 3), ("dog", 1)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(num):
            np.save(tmp_path / "images" / name / f"{number}.npy", image)
    spec = small_spec("vit", folder)
    del spec["model"]["num_labels"]
    spec["data"] = {"folder": str(tmp_path / "images"), "validation_fraction": 0, "cache_dir": str(tmp_path / "cache")}
    _, task, own = _loaded(spec)
    first, *_, last = SHOWN[IMAGE_CLASS_TASK](own, task.train_data, range(4))
    assert (first["label"], last["label"]) == ("cat", "dog")
    [numbers] = [text["spans"] for text in first["texts"]]
    assert numbers == [["3 x 16 x 16, -1 to 1, mean -0.5", False]]
    assert first["drawn"] == "\n".join(["@@@@@@@@"] * 4 + [""] * 4)
    assert np.array_equal(first["pixels"].numpy(), image)
    assert task.train_data.label_counts() == {0: 3, 1: 1}
    (tmp_path / "images" / "cat" / "bad.npy").write_bytes(b"no image")
    spec["data"]["bad_rows"] = "skip"
    lines = describe_data(show(parse_spec(spec), 2)).splitlines()
    left_out = [line for line in lines if "the first: " in line and "cat/bad.npy is no image that can be" in line]
    assert [line.split()[0] for line in left_out] == ["left", "note:"], "the note is in the job's log too"
    assert {"  label cat: 75.0 %", "  label dog: 25.0 %", "    pixels: 3 x 16 x 16, -1 to 1, mean -0.5"} <= {*lines}
    assert lines.count("    @@@@@@@@") == 8
    assert any(line.startswith("  sample 2: as it arrives, label ") for line in lines)
    speech = small_spec("whisper", folder)
    speech["data"]["validation_fraction"] = 0  # which samples are held back depends on the paths of their files
    _, task, own = _loaded(speech)
    [row] = SHOWN[SPEECH_TASK](own, task.train_data, [0])
    assert row["texts"][0]["spans"][0][0].startswith("16 x 100, ")
    assert (row["texts"][1], row["in_loss"]) == ({"title": "text", "spans": [["tone 0<end>", True]], "in_loss": 7}, 7)
